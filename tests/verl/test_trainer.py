"""verl's asynchronous trainer takes its rollouts from the scheduler."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched.kernel.values.companions import Companion
from aprilsched.simulation.engine.toy_model import toy_rows
from aprilsched.trainers import verl as adapter
from aprilsched.trainers.adapter import class_of
from tests.verl.conftest import STEPS

pytest.importorskip("verl", reason="verl is not installed; use make test-verl")

PROMPTS, SIZE = 4, 4


def check_groups(trained: list[Any], first: int = 1) -> None:
    """Check that every step from the `first` on had whole groups, and that nothing was trained on
    twice."""
    keys = [trajectory.key for trajectory in trained]
    assert len(set(keys)) == len(keys)
    steps: dict[str, set[int]] = {}
    for trajectory in trained:
        steps.setdefault(trajectory.key.split("_")[0], set()).add(trajectory.step)
    assert all(len(found) == 1 for found in steps.values())
    assert Counter(step for (step,) in steps.values()) == dict.fromkeys(
        range(first, STEPS + 1), PROMPTS
    )
    assert set(keys) == {f"{uid}_{session}_0" for uid in steps for session in range(SIZE)}


@pytest.mark.usefixtures("holding")
def test_training_with_updates_that_wait_for_the_scheduler(run: Callable[..., Any], weights: Path):
    trainer, labels = run(
        adapter._task_runner(), "trainer.val_before_train=True", f"trainer.test_freq={STEPS}"
    )
    trained, logged = trainer.trained, trainer.logged
    check_groups(trained)
    for each in trained:
        versions = each.versions(weights)
        tag = each.tag
        assert [tag["min_global_steps"], tag["max_global_steps"]] == [versions[0], versions[-1]]
        assert each.rm_scores[:-1].sum() == 0
        assert 0 <= each.rm_scores[-1] < 1
        assert tag["seq_len"] == len(each.prompts) + len(each.responses)
    spans = [each.tag["max_global_steps"] - each.tag["min_global_steps"] + 1 for each in trained]
    assert max(spans) > 1
    for step, metrics in enumerate(logged, start=1):
        found = [s for s, each in zip(spans, trained, strict=True) if each.step == step]
        assert metrics["training/off_policy/trajectory_spans/mean"] == np.mean(found)
        assert metrics["training/off_policy/trajectory_staleness/min"] >= 0
        assert metrics["critic/score/mean"] == pytest.approx(
            np.mean([each.rm_scores.sum() for each in trained if each.step == step])
        )
    # The group whose reward function raises has failed, and verl has replaced it.
    failed = "training/rollout_failure/evicted_samples"
    assert sum(metrics.get(failed, 0) for metrics in logged) == 1
    assert "val-core/words/acc/mean@1" in logged[-1]
    assert labels == [str(STEPS)] * 2


@pytest.mark.shows("single samples", engine="embedded", adapter="verl")
@pytest.mark.parametrize(("loop", "threshold"), [("single_turn_agent", 8), ("two_outputs", 2)])
def test_single_samples_with_the_advantage_of_their_siblings(
    run: Callable[..., Any], weights: Path, loop: str, threshold: int
):
    """With a threshold of two steps verl drops rollouts of the prompts pushed ahead."""
    manager = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    sampler = "trainer.v1.sampler.custom_sampler"
    trainer, labels = run(
        adapter._task_runner(),
        f"{manager}=tests.verl.on_cpu.SingleSamples",
        f"{sampler}.path=pkg://aprilsched.trainers.verl",
        f"{sampler}.name=scheduled_batches",
        "algorithm.adv_estimator=aprilsched",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={loop}",
        "trainer.val_before_train=True",
        f"trainer.test_freq={STEPS}",
        f"trainer.v1.sampler.max_off_policy_threshold={threshold}",
    )
    trained = trainer.trained
    assert len({each.key for each in trained}) == len(trained)
    outputs = 1 + (loop == "two_outputs")
    # A rollout is the trajectories of one session, which are trained on together.
    rollouts = Counter((each.key.rsplit("_", 1)[0], each.step) for each in trained)
    assert set(rollouts.values()) == {outputs}
    assert len({name for name, _ in rollouts}) == len(rollouts)
    assert Counter(step for _, step in rollouts) == dict.fromkeys(
        range(1, STEPS + 1), PROMPTS * SIZE
    )
    groups: dict[str, dict[str, Any]] = {}
    for each in trained:
        uid, session, _ = each.key.split("_")
        groups.setdefault(uid, {})[session] = each
        versions = each.versions(weights)
        assert [each.tag["min_global_steps"], each.tag["max_global_steps"]] == [
            versions[0],
            versions[-1],
        ]
        assert each.step - 1 - versions[0] < threshold
    compared = 0
    for whole in (group for group in groups.values() if len(group) == SIZE):
        for session, each in whole.items():
            others = [whole[other].rm_scores.sum() for other in whole if other != session]
            # The siblings are two of the three others.
            means = [np.mean(pair) for pair in combinations(others, SIZE // 2)]
            (advantage,) = set(each.advantages[each.response_mask.astype(bool)].tolist())
            baseline = each.rm_scores.sum() - advantage
            assert any(baseline == pytest.approx(mean, abs=1e-5) for mean in means)
            compared += 1
    assert compared
    evicted = [step["training/off_policy/evicted_samples"] for step in trainer.logged]
    assert (sum(evicted) > 0) == (threshold == 2)
    assert "val-core/words/acc/mean@1" in trainer.logged[-1]
    assert labels == [str(STEPS)] * 2


@pytest.mark.parametrize("manager", ["Masked", "Automatic"])
def test_batches_that_the_scheduler_forms(run: Callable[..., Any], weights: Path, manager: str):
    sampler = "trainer.v1.sampler.custom_sampler"
    trainer, labels = run(
        adapter._task_runner(),
        f"actor_rollout_ref.rollout.agent.agent_loop_manager_class=tests.verl.on_cpu.{manager}",
        "actor_rollout_ref.rollout.free_cache_engine=False",
        f"{sampler}.path=pkg://aprilsched.trainers.verl",
        f"{sampler}.name=scheduled_batches",
    )
    check_groups(trainer.trained)
    bound = {"Masked": 1, "Automatic": 4}[manager]
    for each in trainer.trained:
        stretches = each.stretches(weights, every=True)
        assert sum(len(places) for _, places in stretches) == len(each.responses)
        for step, places in stretches:
            counts = each.response_mask[places.start : places.stop]
            assert (counts == (each.step - 1 - step <= bound)).all()
    ages = [each.step - 1 - each.versions(weights)[0] for each in trainer.trained]
    assert max(ages) > 0
    assert labels == [str(STEPS)] * 2


@pytest.mark.shows(
    "abort",
    "weights that the trainer moves",
    "sessions and agents",
    engine="embedded",
    adapter="verl",
)
def test_training_with_updates_that_the_next_prompts_tell_of(
    run: Callable[..., Any], weights: Path, monkeypatch: pytest.MonkeyPatch
):
    """With verl's own runner, the scheduler learns of an update only when prompts come. Here the
    training is resumed after two steps, and each rollout has two turns."""
    from verl.trainer.main_ppo import TaskRunnerV1

    from tests.verl.on_cpu import Trainer

    monkeypatch.setattr(Trainer, "_load_checkpoint", lambda self: setattr(self, "global_steps", 2))

    trainer, labels = run(
        class_of(TaskRunnerV1),
        "actor_rollout_ref.rollout.agent.default_agent_loop=two_turns",
    )
    assert labels == [str(STEPS - 1)] * 2
    check_groups(trainer.trained, first=3)
    for each in trainer.trained:
        versions = each.versions(weights)
        assert each.tag["min_global_steps"] in (versions[0], versions[0] - 1)
        assert each.tag["max_global_steps"] in (versions[-1], versions[-1] - 1)
        assert (each.response_mask == 0).sum() == 2
    assert {metrics["training/num_turns/mean"] for metrics in trainer.logged} == {4}


@pytest.mark.shows("routed experts", engine="embedded", adapter="verl")
@pytest.mark.usefixtures("holding")
def test_the_experts_of_each_token_are_of_the_pass_that_sampled_it(
    run: Callable[..., Any], weights: Path
):
    """Across the updates, where contexts are computed again under the new weights."""
    manager = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    trainer, _ = run(
        adapter._task_runner(),
        f"{manager}=tests.verl.on_cpu.WithExperts",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
    )
    check_groups(trainer.trained)
    experts, several = Companion("routed_experts", "uint8", (3, 2)), 0
    for each in trainer.trained:
        assert each.routed_experts.shape == (len(each.prompts) + len(each.responses), 3, 2)
        stretches = each.stretches(weights)
        several += len(stretches) > 1
        for step, places in stretches:
            # The pass that sampled a token read the one before it.
            rows = np.array(places) + len(each.prompts) - 1
            key = zlib.crc32((weights / f"step-{step}" / "model.safetensors").read_bytes())
            keys = np.full(len(rows), key, dtype=np.uint64)
            assert np.array_equal(each.routed_experts[rows], toy_rows(experts, rows, keys).values)
    assert several
