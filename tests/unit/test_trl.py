"""TRL's own trainer and its rewards, with rollouts from the embedded engine."""

# pyright: basic
# The packages have no complete types.
from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from aprilsched import Group, Prompt, SchedulerConfig, SimFleet, SimPublisher
from aprilsched.errors import ConfigError, RefitError
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.trainers import trl
from aprilsched.trainers.trl import RolloutWorker
from aprilsched.trainers.trl_tools import Conversation, ToolHarness
from aprilsched.types import Rollout, Sample, Score, Sibling
from tests.support.facts import response
from tests.support.table import each_row
from tests.support.trl_run import arguments, hold_one, trainer_of, trl_without_a_gpu

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="could not import 'trl'"
)

STEP = 8
"""Rollouts of one step: 2 groups of 4."""
DATA: Any = [
    {"prompt": [{"role": "user", "content": f"w{i + 10} w{i + 11}"}], "target": i}
    for i in range(12)
]


@pytest.fixture(scope="module")
def cpu() -> Iterator[Any]:
    """The helpers of :mod:`tests.support.trl_on_cpu`, with TRL's GPU calls replaced."""
    with trl_without_a_gpu():
        from tests.support import trl_on_cpu

        yield trl_on_cpu


@pytest.fixture(scope="module")
def model(cpu: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpu.write_model(tmp_path_factory.mktemp("model"))


async def add(days: int) -> str:
    """Adds a day.

    Args:
        days: number of days.
    """
    return f"w{days + 1}"


def near(completion_ids: list[list[int]], target: list[int], **_: Any) -> list[float]:
    return [
        1 / (1 + abs(len(ids) - 4 * goal)) for ids, goal in zip(completion_ids, target, strict=True)
    ]


async def brief(completions: list[Any], **_: Any) -> list[float | None]:
    """It does not apply to responses with an odd number of words."""
    words = [len(completion[0]["content"].split()) for completion in completions]
    return [None if count % 2 else 1 / (1 + count) for count in words]


def first(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Its values differ in a group whose responses are all as long as they may be."""
    return [float(ids[0]) for ids in completion_ids]


class Spy(RolloutWorker):
    """Notes what it is made of, and every rollout that the trainer was given."""

    def __init__(self, fleet: Any, **given: Any) -> None:
        super().__init__(fleet, **given)
        self.fleet, self.given = fleet, given
        self.seen: list[Any] = []

    def get(self, timeout: float | None = None) -> Any:
        sample = super().get(timeout)
        self.seen.append(sample)
        return sample

    def check_staleness(self, most: int) -> None:
        """The step that trains on a rollout starts with version step + 1; TRL counts from 1."""
        for number, sample in enumerate(self.seen):
            assert number // STEP + 1 - sample.model_version <= most

    def check_groups(self) -> None:
        """Check that each group came once, and in one piece."""
        groups = [sample.group_id for sample in self.seen[: len(self.seen) // 4 * 4]]
        assert groups[::4] == groups[1::4] == groups[2::4] == groups[3::4]
        assert len(set(groups)) == len(groups) / 4


def worker(
    cpu: Any,
    folder: Path,
    args: Any = None,
    fleet: Any = None,
    kind: Any = None,
    **changes: Any,
) -> Spy:
    values: dict[str, Any] = {
        "args": args if isinstance(args, SimpleNamespace) else arguments(folder, **(args or {})),
        "train_dataset": DATA,
        "processing_class": cpu.tokenizer(),
        "reward_funcs": [near, brief],
        "reward_weights": [1.0, 0.5],
        "config": SchedulerConfig(over_provision=2.0, pace="asynchronous"),
        "publisher": lambda weights: SimPublisher(),
    }
    embedded = SimFleet(1, time_scale=0.01, vocab_size=cpu.VOCABULARY, eos_token_id=0)
    return (kind or Spy)(fleet or embedded, **{**values, **changes})


@contextmanager
def opened(made: Spy) -> Iterator[Spy]:
    """The worker with its engines open."""
    made.init_weight_transfer()
    try:
        yield made
    finally:
        made.stop()


@contextmanager
def started_at(made: Spy) -> Iterator[Spy]:
    """The worker after what the trainer does before its first step."""
    with opened(made):
        made.pause()
        made.send_weights(iter([]))
        made.resume()
        made.update_model_version(1)
        made.start()
        yield made


def train(made: Spy, model: Path, **changes: Any) -> Any:
    trainer = prepared(made, model)
    trainer.train(**changes)
    return trainer


def prepared(
    made: Spy, model: Path, *callbacks: Any, streamed: bool | None = None, amid: Any = None
) -> Any:
    """A trainer, which calls `amid` at the start of each micro-batch's forward."""
    trainer = trainer_of(
        made,
        model,
        args=made.given["args"],
        train_dataset=DATA,
        processing_class=made.given["processing_class"],
        streamed=made.streamed if streamed is None else streamed,
        callbacks=callbacks,
    )
    if amid is not None:
        trainer.model.register_forward_pre_hook(lambda *_: amid())
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("pace", ["synchronous", "asynchronous"])
def test_the_trainer_trains_and_what_it_trains_on_is_not_older_than_promised(
    cpu: Any, model: Path, tmp_path: Path, pace: Any
):
    made = worker(cpu, tmp_path, config=SchedulerConfig(over_provision=2.0, pace=pace))
    trainer = train(made, model)
    assert trainer.state.global_step == 8
    # accelerate fetches the first micro-batch of the next step.
    assert len(made.seen) == 8 * STEP + STEP // 2
    assert max(logged(trainer, "sample/staleness_max")) <= 3
    assert not logged(trainer, "sample/dropped_stale_total")
    made.check_staleness(3)
    made.check_groups()
    for sample in made.seen:
        assert sample.input_ids.dtype == sample.completion_mask.dtype == np.int64
        assert sample.old_log_probs.dtype == np.float32
        counts = sample.completion_mask == 1
        assert len(sample.input_ids) == len(counts) == len(sample.old_log_probs)
        assert counts.any()
        assert not sample.old_log_probs[~counts].any()
        assert (sample.old_log_probs[counts] < 0).any()
    assert logged(trainer, "rewards/near")
    assert logged(trainer, "completions/mean_length")


@pytest.mark.shows("checkpoints with partials", engine="embedded", adapter="TRL")
def test_a_resumed_trainer_gets_everything_that_was_in_flight(
    cpu: Any, model: Path, tmp_path: Path
):
    """The first trainer is stopped after step 5. Its checkpoint is of step 4, and it had fetched
    rollouts of the fifth and the sixth step."""
    saving = {"save_strategy": "steps", "save_steps": 4}
    first = worker(cpu, tmp_path, args={**saving, "max_steps": 5})
    train(first, model)
    second = worker(cpu, tmp_path, args={**saving, "max_steps": 10})
    known: dict[str, Any] = {}

    def at_the_end(*_: Any, **__: Any) -> None:
        while second.qsize():  # The rest of the batch that is taken.
            second.get()
        state = second.scheduler.state.in_flight
        known["flying"], known["launched"] = set(state.groups), state.counters.launched // 4

    second.callback.on_train_end = at_the_end  # type: ignore[method-assign]
    trainer = train(second, model, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert trainer.state.global_step == 10
    # The fifth batch was taken and not trained on, so it comes again as it was.
    again = zip(first.seen[4 * STEP : 5 * STEP], second.seen[:STEP], strict=True)
    for before, after in again:
        assert before.group_id == after.group_id
        assert np.array_equal(before.input_ids, after.input_ids)
        assert np.array_equal(before.old_log_probs, after.old_log_probs)
        assert before.advantage == after.advantage
        assert before.metrics == pytest.approx(after.metrics, nan_ok=True)
    trained = [s.group_id for s in first.seen[: 4 * STEP] + second.seen[: 6 * STEP]]
    ahead = {s.group_id for s in second.seen[6 * STEP :]}
    assert len(set(trained)) == len(trained) / 4, "nothing was trained on twice"
    # Every group that was ever launched was trained on, or is with the trainer or in flight.
    assert len(set(trained) | ahead | known["flying"]) == known["launched"]
    second.check_staleness(3)


def test_servers_that_have_the_checkpoints_weights_do_not_make_it_a_version_older(
    cpu: Any, model: Path, tmp_path: Path
):
    """The second trainer finds the servers as the first one has left them after its last step."""
    saving = {"save_strategy": "steps", "save_steps": 6, "max_staleness": 1}
    first = worker(cpu, tmp_path, args={**saving, "max_steps": 6})
    train(first, model)
    second = worker(cpu, tmp_path, args={**saving, "max_steps": 9}, fleet=first.fleet)
    trainer = train(second, model, resume_from_checkpoint=True)
    assert trainer.state.global_step == 9
    assert not logged(trainer, "sample/dropped_stale_total")
    assert np.array_equal(first.seen[6 * STEP].input_ids, second.seen[0].input_ids)
    second.check_staleness(1)


ON_POLICY = {"max_staleness": 0}
"""Arguments of a trainer that trains on nothing that is older than its weights."""


def streaming(cpu: Any, folder: Path, args: dict[str, Any] | None = None, **changes: Any) -> Spy:
    """A worker of which the trainer takes group by group, without a stale token."""
    return worker(
        cpu,
        folder,
        args={**ON_POLICY, **(args or {})},
        **{"config": SchedulerConfig(pace="asynchronous"), **changes},
        streamed=True,
    )


class LastWaits:
    """A reward function. It scores the last group of every batch only once the trainer runs the
    forward of an earlier one, so a trainer that waits for whole batches would never end."""

    __name__ = "near"

    def __init__(self, steps: int, groups: int) -> None:
        self._steps = steps
        self._groups = groups
        self._changed = threading.Condition()
        self.events: list[str] = []

    def forward(self) -> None:
        with self._changed:
            self.events.append("forward")
            self._changed.notify_all()

    def __call__(self, completion_ids: list[Any], target: list[int], **_: Any) -> list[float]:
        with self._changed:
            scored = self.events.count("group")
            self.events.append("group")
            step, place = divmod(scored, self._groups)
            if place == self._groups - 1 and step < self._steps:
                before = step * self._groups
                assert self._changed.wait_for(lambda: self.events.count("forward") > before, 60)
                self.events.append("last")
        return near(completion_ids, target)


@pytest.mark.parametrize(
    "pace", ["synchronous", pytest.param("asynchronous", marks=pytest.mark.long)]
)
def test_early_groups_are_trained_on_while_the_last_one_is_waited_for(
    cpu: Any, model: Path, tmp_path: Path, pace: Any
):
    steps, groups = 4, 3
    reward = LastWaits(steps, groups)
    made = streaming(
        cpu,
        tmp_path,
        args={"max_steps": steps, "gradient_accumulation_steps": groups},
        config=SchedulerConfig(pace=pace),
        reward_funcs=reward,
        reward_weights=None,
    )
    trainer = prepared(made, model, amid=reward.forward)
    trainer.train()
    assert trainer.state.global_step == steps
    assert reward.events.count("last") == steps
    # Nothing is fetched ahead, and every token is of the weights that it trains.
    assert len(made.seen) == steps * groups * 4
    for number, sample in enumerate(made.seen):
        assert sample.model_version == number // (groups * 4) + 1
    assert not logged(trainer, "sample/dropped_stale_total")
    assert max(logged(trainer, "sample/staleness_max")) == 0
    made.check_groups()


def test_a_streamed_trainer_that_stops_in_a_batch_gets_it_again_from_its_first_group(
    cpu: Any, model: Path, tmp_path: Path
):
    """It saves a checkpoint in the third step, of which it has trained on two of three groups.
    Their gradients are lost with the process, so they are trained on again."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_substep_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            if state.global_step == 2 and len(first.seen) == 2 * 12 + 8:
                control.should_save = control.should_training_stop = True

    args = {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 100}
    first = streaming(cpu, tmp_path, args={**args, "max_steps": 5})
    prepared(first, model, Stop()).train()
    assert len(first.seen) == 2 * 12 + 8
    second = streaming(cpu, tmp_path, args={**args, "max_steps": 5})
    trainer = train(second, model, resume_from_checkpoint=True)
    assert trainer.state.global_step == 5
    assert len(second.seen) == 3 * 12
    for before, after in zip(first.seen[2 * 12 :], second.seen[:8], strict=True):
        assert before.group_id == after.group_id
        assert np.array_equal(before.input_ids, after.input_ids)
        assert before.advantage == after.advantage
    trained = [sample.group_id for sample in first.seen[: 2 * 12] + second.seen]
    assert len(set(trained)) == len(trained) / 4 == 5 * 3
    # TRL counts its versions from 1 again.
    assert [s.model_version for s in second.seen] == [1] * 12 + [2] * 12 + [3] * 12
    assert not logged(trainer, "sample/dropped_stale_total")


class Replaying(Spy):
    """Gives the trainer rollouts of another run first."""

    replayed: list[Any]

    def get(self, timeout: float | None = None) -> Any:
        return self.replayed.pop(0) if self.replayed else super().get(timeout)


@pytest.mark.parametrize("rows", [4, pytest.param(2, marks=pytest.mark.long)])
def test_a_streamed_step_has_the_gradient_of_its_batch_taken_whole(
    cpu: Any, model: Path, tmp_path: Path, rows: int
):
    """Also in the opposite order. A micro-batch is a group, or half of one."""
    import torch
    from transformers import TrainerCallback

    class Gradients(TrainerCallback):
        def __init__(self) -> None:
            self.found: dict[str, Any] = {}

        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            self.found = {name: each.grad.clone() for name, each in model.named_parameters()}

    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 12 // rows}
    args = {**sizes, "max_steps": 1, "max_staleness": 1, "max_grad_norm": 0.0}
    rewards: dict[str, Any] = {"reward_funcs": [first], "reward_weights": [1.0]}
    streamed = worker(cpu, tmp_path, args=args, streamed=True, **rewards)
    whole: Any = worker(cpu, tmp_path, args=args, kind=Replaying, **rewards)
    ours, theirs = Gradients(), Gradients()
    prepared(streamed, model, ours).train()
    groups = [streamed.seen[start_sync : start_sync + 4] for start_sync in range(0, 12, 4)]
    assert len(streamed.seen) == 12
    whole.replayed = [sample for group in reversed(groups) for sample in group]
    prepared(whole, model, theirs).train()
    assert not whole.replayed
    assert max(float(each.abs().max()) for each in theirs.found.values()) > 1e-3
    for name, gradient in theirs.found.items():
        torch.testing.assert_close(ours.found[name], gradient, rtol=1e-4, atol=1e-6)


def test_advantages_and_metrics_are_those_of_trls_own_worker(cpu: Any, tmp_path: Path):
    from trl.experimental.async_grpo import async_rollout_worker as theirs

    with started_at(worker(cpu, tmp_path, reward_weights=None)) as made:
        samples = [made.get() for _ in range(2 * STEP)]
    loop: Any = object.__new__(theirs._AsyncRolloutLoop)
    loop.reward_funcs, loop.reward_func_names = [near, brief], ["near", "brief"]
    loop._env_reward_types = []
    for start_sync in range(0, len(samples), 4):
        ours = samples[start_sync : start_sync + 4]
        row = next(row for row in DATA if row["prompt"] == ours[0].prompt)
        ids = [s.input_ids[s.completion_mask == 1].tolist() for s in ours]
        group = theirs.RolloutGroup(
            prompts=[s.prompt for s in ours],
            reward_kwargs={"target": [row["target"]] * 4},
            completions=[s.completion for s in ours],
            completions_ids=ids,
            completions_sequences=[
                [theirs.TrainingSequence(s.input_ids, s.completion_mask, s.old_log_probs, "")]
                for s in ours
            ],
            tool_call_counts=[0] * 4,
            tool_failure_counts=[0] * 4,
            model_version=0,
            group_id=0,
            env_rewards=[],
            rollout_rewards=[],
        )
        right = asyncio.run(loop._score_group(group))
        for our, their in zip(ours, right, strict=True):
            assert our.advantage == pytest.approx(their.advantage)
            assert our.metrics == pytest.approx(their.metrics, nan_ok=True)


SAMPLES = SchedulerConfig(over_provision=2.0, pace="asynchronous", delivery="samples", siblings=2)


class Units(Spy):
    """Notes the single sample behind every rollout that the trainer was given."""

    def __init__(self, fleet: Any, **given: Any) -> None:
        super().__init__(fleet, **given)
        self.units: list[Sample] = []

    def _trl_samples(self, unit: Any, version: int) -> Any:
        self.units.append(unit)
        return super()._trl_samples(unit, version)

    def check(self) -> None:
        """Each rollout came once, with the advantage that its two siblings give it."""
        seen = self.units[: len(self.seen)]
        ids = [unit.rollout.rollout_id for unit in seen]
        assert len(set(ids)) == len(ids)
        for unit, sample in zip(seen, self.seen, strict=True):
            own, *rewards = (float(each.reward or 0) for each in (unit, *unit.siblings))
            assert len(rewards) == 2
            assert sample.group_id == unit.group_id
            assert sample.metrics["reward"] == own == unit.reward
            assert sample.metrics["reward_std"] == pytest.approx(np.std([own, *rewards]))
            if sample.completion_mask.sum() > 1:
                assert sample.advantage == pytest.approx(own - sum(rewards) / 2)


@pytest.mark.shows("single samples", engine="embedded", adapter="TRL")
@pytest.mark.parametrize("streamed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_samples_are_trained_on_with_the_advantages_of_their_siblings(
    cpu: Any, model: Path, tmp_path: Path, streamed: bool
):
    """A filter drops every fifth sample, and the batches are full all the same."""
    made: Any = worker(
        cpu,
        tmp_path,
        args=ON_POLICY if streamed else None,
        kind=Units,
        config=replace(SAMPLES, over_provision=1.5 if streamed else 2.0),
        accept=lambda unit: bool(unit.rollout.rollout_id % 5),
        streamed=streamed,
    )
    trainer = prepared(made, model)
    trained: list[set[float]] = []
    loss = trainer.compute_loss

    def noted(model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
        trained.append({round(float(each), 5) for each in inputs["advantages"].unique()})
        return loss(model, inputs, *args, **given)

    trainer.compute_loss = noted
    trainer.train()
    assert trainer.state.global_step == 8
    assert len(made.seen) == 8 * STEP + (0 if streamed else STEP // 2)
    made.check()
    made.check_staleness(0 if streamed else 3)
    assert not logged(trainer, "sample/dropped_stale_total")
    assert all(unit.rollout.rollout_id % 5 for unit in made.units)
    # A micro-batch has 4 rollouts, and TRL fills rows with advantage 0.
    assert len(trained) == 16
    for number, found in enumerate(trained):
        own = {round(sample.advantage, 5) for sample in made.seen[4 * number : 4 * number + 4]}
        assert own <= {*found, 0.0}
        assert found <= {*own, 0.0}
    steps: dict[int, set[int]] = {}
    for number, sample in enumerate(made.seen):
        steps.setdefault(sample.group_id, set()).add(number // STEP)
    assert any(len(each) > 1 for each in steps.values()), "no group came in several batches"


def test_a_trainer_that_ends_between_two_batches_of_a_group_resumes_both(
    cpu: Any, model: Path, tmp_path: Path
):
    """The first trainer ends after step 5, and the second one continues after step 4. The last
    sample of the first prompt is not accepted before that."""
    saving = {"save_strategy": "steps", "save_steps": 4}

    def process(steps: int, accept: Any) -> Any:
        args = {**saving, "max_steps": steps}
        return worker(cpu, tmp_path, args=args, kind=Units, config=SAMPLES, accept=accept)

    first = process(5, hold_one)
    train(first, model)
    second = process(12, lambda unit: True)
    known: dict[str, Any] = {}

    def at_the_end(*_: Any, **__: Any) -> None:
        while second.qsize():
            second.get()
        state = second.scheduler.state.in_flight
        known["flying"], known["launched"] = set(state.rollouts), state.counters.launched
        known["lost"] = state.ledger.total

    second.callback.on_train_end = at_the_end
    trainer = train(second, model, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert trainer.state.global_step == 12
    first.check()
    second.check()
    before, after = first.units[: 4 * STEP], second.units[: 8 * STEP]
    for old, new in zip(first.units[4 * STEP : 5 * STEP], after, strict=False):
        assert np.array_equal(old.rollout.token_ids, new.rollout.token_ids)
        assert (old.unit_id, old.siblings) == (new.unit_id, new.siblings)
    trained = [unit.unit_id for unit in before + after]
    assert len(set(trained)) == len(trained) == 12 * STEP
    ahead = {unit.unit_id for unit in second.units[8 * STEP :]}
    assert known["lost"] == 0
    assert len(set(trained) | ahead | known["flying"]) == known["launched"]
    apart = {unit.group_id for unit in before} & {unit.group_id for unit in after}
    assert apart, "no group was delivered on both sides of the checkpoint"
    # What was a sibling before the end has the same reward after it.
    rewards = {unit.unit_id: unit.reward for unit in before + after}
    for unit in before + after:
        for each in unit.siblings:
            assert rewards.get(each.rollout_id, each.reward) == each.reward


def test_a_sample_without_a_reward_costs_itself_alone(cpu: Any, tmp_path: Path):
    """As reward 0 it would count in the baseline of its siblings."""
    with started_at(
        worker(
            cpu, tmp_path, kind=Units, config=SAMPLES, reward_funcs=[brief], reward_weights=[1.0]
        )
    ) as made:
        for _ in range(3 * STEP):
            made.get()
            made.trained()
        lost = made.scheduler.state.in_flight.ledger.rollouts
        assert lost[Reason.REWARD_FAILED]
        # The last two members of a group are dropped together.
        assert lost[Reason.SIBLING_FAILED] < lost[Reason.REWARD_FAILED]
    for unit in made.units:  # type: ignore[attr-defined]
        assert unit.rollout.reward_parts.keys() == {"brief"}
        assert all(each.reward for each in unit.siblings)


def test_a_sample_without_siblings_gives_no_gradient(cpu: Any, tmp_path: Path):
    made = worker(cpu, tmp_path, reward_weights=[1.0, 2.0], config=SAMPLES)
    prompt = Prompt(input_ids=np.array([1, 2]), key=5)
    rollout = of_versions(7, 8, score=Score(reward=1.0, parts={"near": 1.0}))
    two = tuple(Sibling(rollout_id=i, index=i, reward=float(i)) for i in (1, 2))
    alone, usual = (
        next(made._trl_samples(Sample(rollout=rollout, prompt=prompt, siblings=each), version=9))
        for each in ((), two)
    )
    assert (alone.advantage, alone.metrics["reward_std"]) == (0.0, 0.0)
    assert (usual.advantage, usual.metrics["reward"]) == (-0.5, 1.0)


def of_versions(*versions: int, masked: bool = False, score: Score | None = None) -> Rollout:
    count, found = len(versions), score or Score(reward=0.0)
    return response(
        versions,
        group_id=3,
        token_ids=np.arange(count, dtype=np.int32) + 5,
        logprobs=np.full(count, -0.5, dtype=np.float32),
        loss_mask=np.full(count, not masked),
        reward=found.reward,
        reward_parts=found.parts,
    )


def test_a_rollout_that_is_masked_as_a_whole_gives_no_gradient(cpu: Any, tmp_path: Path):
    """TRL drops it if its version is too old, and fails on a micro-batch without a token."""
    made = worker(cpu, tmp_path, reward_weights=[1.0, 2.0])
    rollouts = (
        of_versions(7, 8, score=Score(reward=1.0, parts={"near": 1.0})),
        of_versions(1, 1, masked=True, score=Score(reward=3.0, parts={"near": 1.0, "brief": 1.0})),
        of_versions(6, 6, score=Score(reward=0.0)),
    )
    group = Group(group_id=3, prompt=Prompt(input_ids=np.array([1, 2]), key=5), rollouts=rollouts)
    young, masked, unscored = made._trl_samples(group, version=9)
    assert young.completion_mask.tolist() == [0, 0, 1, 1]
    assert (young.model_version, young.advantage) == (7, pytest.approx(-1.0))
    assert masked.completion_mask.tolist() == [0, 0, 0, 1]
    assert (masked.model_version, masked.advantage) == (9, 0.0)
    assert masked.metrics["reward"] == 3.0
    assert (unscored.advantage, np.isnan(unscored.metrics["reward"])) == (0.0, True)


def test_a_trainer_that_waits_in_turns_loses_nothing_and_needs_the_callback(
    cpu: Any, tmp_path: Path
):
    made = worker(cpu, tmp_path)
    with pytest.raises(ConfigError, match="as weight_transfer and as rollout_worker"):
        made.start()
    with started_at(made):
        while not made.seen:
            with suppress(queue.Empty):
                made.get(0.0)
        assert made.qsize() == STEP - 1
        for _ in range(2 * STEP - 1):
            made.get()
        with pytest.raises(ConfigError, match=r"give callbacks=\[worker\.callback\]"):
            made.get()


def test_a_reward_function_that_raises_ends_the_training_with_its_error(cpu: Any, tmp_path: Path):
    def wrong(**_: Any) -> list[float]:
        return [1.0]

    why = pytest.raises(Exception, match="wrong gave 1 rewards for 4 rollouts")
    with started_at(worker(cpu, tmp_path, reward_funcs=wrong, reward_weights=None)) as made, why:
        made.get()


class Repeating:
    """A publisher whose broadcast breaks off after `at` tensors, and is repeated if it can be."""

    def __init__(self, weights: Callable[[], Iterator[Any]], *, at: int, repeats: bool = True):
        self._weights = weights
        self._at = at
        self._repeats = repeats
        self.broken: list[Any] = []
        self.whole: list[Any] = []

    async def prepare(self, version: int) -> None: ...

    async def publish(self, version: int, engines: Any) -> Any:
        first: Any = self._weights()
        self.broken = [next(first) for _ in range(self._at)]
        first.close()
        if not self._repeats:
            raise OSError("the network is gone")
        self.whole = list(self._weights())
        return await SimPublisher().publish(version, engines)


@pytest.mark.parametrize(
    ("repeats", "cause"), [(False, "network is gone"), (True, "train on from the last checkpoint")]
)
def test_weights_that_no_engine_takes_are_read_to_their_end(
    cpu: Any, tmp_path: Path, repeats: bool, cause: str
):
    """Gathering a tensor is a collective: if rank 0 stopped reading, every other rank would wait
    forever. One gathered tensor means that the weights can be read only once."""
    import torch

    model = torch.nn.Linear(2, 2)
    bias = model.bias.detach()
    made = worker(
        cpu, tmp_path, publisher=lambda weights: Repeating(weights, at=2, repeats=repeats)
    )
    weights = iter([("weight", model.weight.detach()), ("bias", bias.clone()), ("more", bias)])
    with opened(made):
        made.start_sync(model)
        with pytest.raises((RefitError, ConfigError), match=cause):
            made.send_weights(weights)
        assert list(weights) == []


@pytest.mark.parametrize("at", [1, 3])
def test_weights_in_the_models_own_memory_can_be_sent_again(cpu: Any, tmp_path: Path, at: int):
    """An engine that fails in the middle of a broadcast does not end the training."""
    import torch

    sent: list[Repeating] = []

    def publisher(weights: Callable[[], Iterator[Any]]) -> Any:
        sent.append(Repeating(weights, at=at))
        return sent[0]

    made = worker(cpu, tmp_path, publisher=publisher)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    weights = ((name, each.detach()) for name, each in model.named_parameters())
    with opened(made):
        made.start_sync(model)
        made.send_weights(weights)
        names = ["0.weight", "0.bias", "1.weight"]
        assert [name for name, _ in sent[0].broken] == names[:at]
        assert [name for name, _ in sent[0].whole] == names
        for (_, tensor), own in zip(sent[0].whole, model.parameters(), strict=True):
            assert tensor.data_ptr() == own.data_ptr()


def test_a_folder_of_weights_has_the_files_and_the_index_that_transformers_loads(
    cpu: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import torch
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(trl, "_SHARD_BYTES", 100_000)
    made = worker(cpu, tmp_path, publisher=tmp_path / "weights")
    own = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.add_(0.1)
    with opened(made):
        made.start_sync(own)
        made.send_weights((name, each.detach()) for name, each in own.named_parameters())
        assert made.scheduler.version == 1
    folder = tmp_path / "weights" / "version-00000001"
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    for name, parameter in own.named_parameters():
        assert torch.equal(parameter, loaded[name])


def test_checkpoints_without_the_schedulers_state_or_an_end_cannot_be_resumed(
    cpu: Any, tmp_path: Path
):
    with pytest.raises(ConfigError, match=r"has no aprilsched\.checkpoint"):
        worker(cpu, tmp_path).restore(tmp_path)
    (tmp_path / "aprilsched.checkpoint").touch()
    with pytest.raises(ConfigError, match="set max_steps"):
        worker(cpu, tmp_path, args={"max_steps": -1, "num_train_epochs": 2}).restore(tmp_path)


def test_streamed_batches_that_cannot_be_are_refused(
    cpu: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    uneven = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError, match="set one of them to a multiple of the other"):
        streaming(cpu, tmp_path, args=uneven)
    with pytest.raises(ConfigError, match=r"raise max_staleness of AsyncGRPOConfig"):
        streaming(cpu, tmp_path, config=SchedulerConfig(max_staleness=1))
    with pytest.raises(ConfigError, match=r"give it a RolloutWorker\(\.\.\., streamed=True\)"):
        prepared(worker(cpu, tmp_path), model, streamed=True).train()
    with pytest.raises(ConfigError, match="only with a trainer that is a StreamedSteps"):
        prepared(streaming(cpu, tmp_path), model, streamed=False).train()
    monkeypatch.setattr(type(arguments(tmp_path)), "world_size", 2)
    with pytest.raises(ConfigError, match="has 2 processes, and streamed batches are for one"):
        streaming(cpu, tmp_path)


SEEN = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


@pytest.mark.lacks("images", adapter="TRL", why="AsyncGRPOTrainer gives its model token ids alone.")
@each_row("row", [{"prompt": "What is it?", "images": ["a.png"]}, {"prompt": SEEN, "image": None}])
def test_a_dataset_with_images_is_refused(cpu: Any, tmp_path: Path, row: dict[str, Any]):
    """TRL would train on the text without them."""
    made = worker(cpu, tmp_path, train_dataset=[{"target": 3, **row}])
    refused = pytest.raises(ConfigError, match="AsyncGRPOTrainer gives its model token ids alone")
    with started_at(made), refused:
        made.get()


@pytest.mark.lacks(
    "routed experts",
    adapter="TRL",
    why="AsyncGRPOTrainer packs token ids into a tree, with no place for other columns.",
)
@each_row(
    ("args", "changes", "error"),
    [
        ({"token_budget": None}, {}, "asks a vLLM server"),
        ({"token_budget": 4096}, {}, "no checkpoint can record"),
        ({"max_staleness": 0}, {}, "set 1 or more"),
        ({"num_generations": 3}, {}, "a step takes 8 rollouts .* and groups have 3"),
        (
            {},
            {"config": SchedulerConfig(max_staleness=3)},
            "raise max_staleness of AsyncGRPOConfig",
        ),
        ({}, {"config": SchedulerConfig(companions=("sampling_mask",))}, "companions are set"),
        ({}, {"reward_weights": [1.0]}, "1 numbers for 2 reward functions"),
        ({}, {"reward_funcs": [near, near]}, "each with another name"),
        ({}, {"reward_funcs": []}, "give at least one"),
        (SimpleNamespace(), {}, "GRPOTrainer ignores the logprobs"),
        ({}, {"environment_factory": dict}, "has no reset"),
    ],
)
def test_settings_that_contradict_the_trainer_are_refused(
    cpu: Any, tmp_path: Path, args: Any, changes: dict[str, Any], error: str
):
    with pytest.raises(ConfigError, match=error):
        worker(cpu, tmp_path, args=args, **changes)


def test_the_trainers_arguments_are_those_of_the_scheduler(cpu: Any, tmp_path: Path):
    args = {"temperature": 0.7, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5}
    config = worker(cpu, tmp_path, args=args).config
    assert (config.batch_groups, config.group_size, config.max_staleness) == (2, 4, 2)
    assert (config.sampling.temperature, config.sampling.top_k) == (0.7, 5)
    assert (config.sampling.min_p, config.sampling.max_new_tokens) == (0.1, 60)
    assert config.sampling.extra == {"repetition_penalty": 1.5}


def test_prompts_are_texts_or_conversations(cpu: Any, calling: Any, tmp_path: Path):
    """A text is not put into the chat template, and its completion is a text. It has no tools."""
    seen: list[Any] = []

    def noted(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        seen.append((prompts[0], completions[0]))
        return [0.0] * len(prompts)

    data = [{"prompt": "w5 w6"}, {"prompt": [{"role": "user", "content": "w7"}]}]
    made = worker(cpu, tmp_path, train_dataset=data, reward_funcs=noted, reward_weights=None)
    with started_at(made):
        samples = [made.get() for _ in range(STEP)]
    starts = {tuple(s.input_ids[s.completion_mask == 0].tolist()) for s in samples}
    assert starts == {(5, 6), (3, 7, 4)}
    for prompt, completion in seen:
        assert isinstance(completion, str) == isinstance(prompt, str)
    made = worker(cpu, tmp_path, train_dataset=data, tools=[add], processing_class=calling)
    with started_at(made), pytest.raises(ConfigError, match="only conversations have tools"):
        made.get()


async def test_a_resumed_run_continues_with_its_next_prompt():
    started: concurrent.futures.Future[None] = concurrent.futures.Future()
    started.set_result(None)
    prompts = trl._Prompts(DATA, lambda row: [5], started).skip(len(DATA) + 2)
    assert (await anext(aiter(prompts))).key == 2


class Weather:
    """An environment whose method is a tool."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.days: list[int] = []

    def reset(self, target: int, **_: Any) -> str:
        self.days = []
        return f" w{20 + target}"

    def look(self, where: str, days: int) -> str:
        """Looks at the weather.

        Args:
            where: a place.
            days: number of days.
        """
        if days % 2 == 0:
            raise ValueError("no such day")
        self.days.append(days)
        return "w9"

    def get_reward(self) -> float:
        return float(len(self.days))


def conversations(made: RolloutWorker) -> dict[int, Any]:
    assert made._tools is not None
    return made._tools.ended


@pytest.fixture
def calling(tmp_path: Path) -> Any:
    """TRL's tokenizer for a model whose random tokens call tools."""
    from transformers import AutoTokenizer

    from tests.support.tiny_tokenizer import calling_tokenizer

    return AutoTokenizer.from_pretrained(calling_tokenizer(tmp_path / "calling", every=9))


@pytest.mark.shows("sessions and agents", engine="embedded", adapter="TRL")
@pytest.mark.parametrize("named", [False, True], ids=["groups", "named-samples"])
def test_tools_and_environments_are_called_in_trls_own_loop(
    cpu: Any, calling: Any, tmp_path: Path, named: bool
):
    seen: list[Any] = []

    def noted(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        seen.extend(zip(prompts, completions, strict=True))
        return [0.5] * len(prompts)

    data = [{**row, "environment": "one"} for row in DATA] if named else DATA
    given: dict[str, Any] = {
        "args": {"max_tool_calling_iterations": 2, "max_completion_length": 8},
        "processing_class": calling,
        "train_dataset": data,
        "reward_funcs": noted,
        "reward_weights": [2.0],
        "tools": [add],
        "environment_factory": {"one": Weather} if named else Weather,
        **({"config": SAMPLES} if named else {}),
    }
    with started_at(worker(cpu, tmp_path, **given)) as made:
        samples = [made.get() for _ in range(2 * STEP)]
        (tmp_path / "checkpoint").mkdir()
        # Further conversations end while the state is saved.
        before = set(conversations(made))
        made.save(tmp_path / "checkpoint")
        kept = dict(conversations(made))
        made.trained()
        made.trained()
        left = set(conversations(made))
    assert len(left & kept.keys()) <= len(kept) - 2 * STEP, "what is trained on is forgotten"
    again = worker(cpu, tmp_path, **{**given, "args": {**given["args"], "max_steps": 9}})
    again.restore(tmp_path / "checkpoint")
    saved = conversations(again)
    assert before <= saved.keys() <= kept.keys()
    assert saved == {number: kept[number] for number in saved}
    calls = failures = 0
    for sample in samples:
        assert {"role": "user"}.items() <= sample.prompt[-1].items()
        # What reset() returned is at the end of the question.
        assert re.fullmatch(r"w\d+ w\d+ w\d+", sample.prompt[-1]["content"])
        assert (sample.prompt, sample.completion) in seen
        roles = "".join(message["role"][0] for message in sample.completion)
        assert re.fullmatch(r"(at+){0,2}a", roles), roles
        results = [m["content"] for m in sample.completion if m["role"] == "tool"]
        good = results.count("w9")
        failures += sum("no such day" in result for result in results)
        assert good == sample.metrics["rewards/Weather"]
        assert sample.metrics["reward"] == 2 * 0.5 + good
        calls += len(results)
        if results or named:
            assert sample.metrics["tools/call_frequency"] == len(results)
        # Only what was sampled counts.
        assert sample.completion_mask.sum() <= 8 * roles.count("a")
        assert (sample.old_log_probs[sample.completion_mask == 0] == 0).all()
    assert calls > failures > 0
    assert Weather.made <= 2 * STEP * 3, "they are made once and reset often"


def test_a_response_with_a_part_for_reasoning_is_taken_apart_as_by_trl(cpu: Any, tmp_path: Path):
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = cpu.tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    tokenizer.add_tokens(["<think>", "</think>"])
    made = worker(cpu, tmp_path, processing_class=tokenizer)
    ids = tokenizer("<think> w7 w8 </think> w9")["input_ids"]
    rollout = msgspec.structs.replace(
        of_versions(*[1] * len(ids)), token_ids=np.array(ids, dtype=np.int32)
    )
    (message,) = made._chat.completion([{"role": "user", "content": "w5"}], rollout)
    assert message["content"].split() == ["w9"]
    assert message["reasoning_content"].split() == ["w7", "w8"]


def test_no_response_is_an_error_of_its_reward(cpu: Any, tmp_path: Path):
    from transformers import AutoTokenizer

    from tests.support.tiny_tokenizer import ODD_CALLS, bytes_tokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(bytes_tokenizer(tmp_path, parses=True))
    chat = worker(cpu, tmp_path, processing_class=tokenizer)._chat
    for call in ODD_CALLS:
        ids = np.array(tokenizer(call)["input_ids"], dtype=np.int32)
        rollout = msgspec.structs.replace(of_versions(*[1] * len(ids)), token_ids=ids)
        (message,) = chat.completion([{"role": "user", "content": "w5"}], rollout)
        assert message["role"] == "assistant"


async def test_half_of_a_surrogate_pair_from_a_tool_is_replaced():
    tools = ToolHarness([], None, rows=[], options={}, most=None)
    found = Conversation(prompt=[])

    def letter(number: int) -> str:
        return chr(number)

    assert await tools._result(found, {"a": letter}, "a", '{"number": 55357}') == "?"
    assert (found.calls, found.failures) == (1, 0)


def test_without_trl_the_extra_is_named():
    program = (
        "import sys; sys.modules['trl'] = None\n"
        "from aprilsched.trainers.trl import RolloutWorker\n"
        "RolloutWorker(None, args=None, train_dataset=[], processing_class=None, reward_funcs=[])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    wanted = r"MissingExtra: trl[.\w]* is not installed; pip install .*\[trl\]'\.$"
    assert re.search(wanted, ended.stderr.splitlines()[-1])
