"""AReaL's own classes with its rollout engine on the embedded engine (`make test-areal`)."""

# pyright: basic, reportMissingImports=false
# The package has no complete types.
from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from aprilsched import Batch, SchedulerConfig, SGLangFleet, SimFleet, advantages
from aprilsched.config import Dispatch, Staleness
from aprilsched.errors import ConfigError, RefitError
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import facts
from aprilsched.simulation.engine.toy_model import toy_rows, weights_key_of_version
from aprilsched.testing.fixtures import StartServer, start_sglang_server
from aprilsched.testing.threaded import ThreadedServer
from aprilsched.trainers.areal import RolloutEngine
from aprilsched.types import NO_VERSION
from tests.support.areal_parts import Client, areal, saved, why_not
from tests.support.companions import EXPERTS
from tests.support.table import each_row

__all__ = ["start_sglang_server"]

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.filterwarnings("ignore"),  # Its packages warn of much.
]

GROUPS, SIZE = 3, 4


@pytest.fixture
def parts(tmp_path: Path) -> SimpleNamespace:
    return areal(tmp_path / "names")


class Loader:
    """A dataloader: lists of items, again and again."""

    def __init__(self, items: int = 12, batch_size: int = GROUPS) -> None:
        self.items = [{"number": number, "ids": [5, 6, 7 + number]} for number in range(items)]
        self.batch_size = batch_size
        self.epochs: list[int] = []
        self.sampler = SimpleNamespace(set_epoch=self.epochs.append)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        for start in range(0, len(self.items), self.batch_size):
            yield self.items[start : start + self.batch_size]


class SingleTurn:
    """A workflow as AReaL's RLVRWorkflow: one request, and a trajectory of one row."""

    def __init__(self, parts: Any, **sampling: Any) -> None:
        self.parts = parts
        self.gconfig = parts.Generation(**{"max_new_tokens": 40, **sampling})
        self.seen: list[Any] = []

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        request = self.parts.Request(input_ids=list(data["ids"]), gconfig=self.gconfig.new())
        response = await engine.agenerate(request)
        self.seen.append((self.parts.context.get(), engine.get_version(), response))
        reward = await self.reward(data, response)
        stats = self.parts.stats.get(self.parts.context.stat_scope())
        stats.scalar(reward=reward)
        return self.trajectory(response, reward)

    async def reward(self, data: dict[str, Any], response: Any) -> float:
        return float(len(response.output_tokens) % 7)

    def trajectory(self, response: Any, reward: float) -> Any:
        prompt, output = response.input_tokens, response.output_tokens
        made = {
            "input_ids": torch.tensor(prompt + output, dtype=torch.int32),
            "loss_mask": torch.tensor([0] * len(prompt) + [1] * len(output), dtype=torch.int32),
            "logprobs": torch.tensor([0.0] * len(prompt) + response.output_logprobs),
            "versions": torch.tensor([-1] * len(prompt) + response.output_versions),
            "attention_mask": torch.ones(len(prompt + output), dtype=torch.bool),
            "rewards": torch.tensor(reward),
        }
        return {name: tensor.unsqueeze(0) for name, tensor in made.items()}


def config(parts: Any, **changes: Any) -> Any:
    values = {
        "backend": "sglang:d1",
        "experiment_name": "experiment",
        "trial_name": "trial",
        "consumer_batch_size": GROUPS,
        "max_head_offpolicyness": 2,
        "request_timeout": 60,
    }
    return parts.Config(**{**values, **changes})


def engine(
    parts: Any, fleet: Any = None, settings: Any = None, listeners: Any = (), **changes: Any
) -> RolloutEngine:
    return RolloutEngine(
        fleet or SimFleet(2, time_scale=0.01),
        config=config(parts, **changes),
        gconfig=parts.Generation(n_samples=SIZE),
        settings=settings or SchedulerConfig(over_provision=2.0, pace="asynchronous"),
        listeners=listeners,
    )


@contextmanager
def opening(made: RolloutEngine) -> Iterator[RolloutEngine]:
    """The engine while it is open."""
    made.initialize(train_data_parallel_size=1)
    try:
        yield made
    finally:
        made.destroy()
        made.destroy()


@pytest.fixture
def opened(parts: SimpleNamespace) -> Iterator[RolloutEngine]:
    with opening(engine(parts)) as made:
        yield made


def update(made: RolloutEngine, parts: Any, folder: Path, version: int) -> Any:
    """What AReaL's trainer does after a step, in its order."""
    meta = parts.Meta(type="disk", path=str(folder / "weights")).with_version(version)
    made.pause()
    made.pause_generation()
    future = made.update_weights_from_disk(meta)
    saved(parts, made.config, version - 1, Path(meta.path))
    future.result(60)
    made.continue_generation()
    made.set_version(version)
    made.set_version(version)  # The engine for evaluations is the same.
    made.resume()
    return meta


def check(batch: list[dict[str, Any]], *, size: int = SIZE) -> None:
    for trajectory in batch:
        ids, mask = trajectory["input_ids"], trajectory["loss_mask"]
        assert ids.shape[0] == size
        for name in ("loss_mask", "logprobs", "versions", "attention_mask"):
            assert trajectory[name].shape == ids.shape
        assert trajectory["rewards"].shape == (size,)
        assert ids.dtype == mask.dtype == trajectory["versions"].dtype == torch.int32
        assert trajectory["logprobs"].dtype == trajectory["rewards"].dtype == torch.float32
        assert trajectory["attention_mask"].dtype == torch.bool
        response = mask.bool()
        assert not (response & ~trajectory["attention_mask"]).any()
        assert (trajectory["versions"][response] >= 0).all()
        asked = trajectory["attention_mask"] & ~response
        assert (trajectory["versions"][asked] == -1).all()
        assert not trajectory["logprobs"][~response].any()
        assert (trajectory["logprobs"][response] < 0).any()
        lengths = response.sum(-1)
        assert trajectory["rewards"].tolist() == (lengths % 7).tolist()
        assert ids[:, :2].tolist() == [[5, 6]] * size
        assert len(set(ids[:, 2].tolist())) == 1, "the rollouts of one prompt"
    from areal.infra import check_trajectory_format
    from areal.utils.data import concat_batch

    assert all(check_trajectory_format(each, batch_size=size) for each in batch)
    concat_batch(batch)


def test_batches_updates_and_staleness(
    parts: SimpleNamespace, opened: RolloutEngine, tmp_path: Path
):
    loader, workflow = Loader(), SingleTurn(parts, max_new_tokens=400)
    ages: list[int] = []
    for version in range(6):
        batch = opened.prepare_batch(loader, workflow, group_size=SIZE)
        assert len(batch) == GROUPS
        check(batch)
        assert opened.get_version() == version
        for trajectory in batch:
            counted = trajectory["versions"][trajectory["loss_mask"].bool()]
            ages += (version - counted).tolist()
        meta = update(opened, parts, tmp_path, version + 1)
        assert not Path(meta.path).exists(), "the checkpoint is removed after the loading"
    assert max(ages) in (1, 2)
    assert min(ages) == 0
    assert loader.epochs[:2] == [0, 1]
    rewards = opened.export_stats()
    assert 0 < rewards["rollout/reward"] < 7
    assert {context.is_eval for context, *_ in workflow.seen} == {False}


def test_the_engines_generate_until_the_weights_are_on_the_disk(
    parts: SimpleNamespace, tmp_path: Path
):
    """AReaL pauses its own engines before it saves."""
    commands: list[Any] = []
    listener: Any = SimpleNamespace(
        on_event=lambda event, now: None, on_command=lambda command, now: commands.append(command)
    )
    made = engine(parts, SimFleet(1, time_scale=0.01), listeners=[listener])
    with opening(made):
        made.prepare_batch(Loader(), SingleTurn(parts), group_size=SIZE)
        meta = parts.Meta(type="disk", path=str(tmp_path / "v1"), clear_checkpoint_after_load=False)
        made.pause_generation()
        future = made.update_weights_from_disk(meta)
        made.prepare_batch(Loader(), SingleTurn(parts), group_size=SIZE)
        assert not future.done()
        assert not [each for each in commands if isinstance(each, do.Pause | facts.RefitBegun)]
        assert made.get_version() == 0
        saved(parts, made.config, 0, Path(meta.path))
        future.result(60)
        assert [each for each in commands if isinstance(each, facts.RefitBegun)]
        assert made.get_version() == 0, "the trainer has not set its version yet"
        made.set_version(1)
        assert made.get_version() == 1
        assert Path(meta.path).exists()


def test_a_trainer_that_fails_while_it_saves_can_be_closed(parts: SimpleNamespace):
    made = engine(parts)
    made.initialize()
    future = made.update_weights_from_disk(parts.Meta(type="disk", path="never-written"))
    made.destroy()
    with pytest.raises(RefitError, match="was destroyed"):
        future.result(0)


def test_the_trainers_versions_begin_at_0_on_servers_that_have_others(
    parts: SimpleNamespace, tmp_path: Path
):
    """Servers of a former run, and a trainer that is recovered at version 40."""
    fleet = SimFleet(1, time_scale=0.01)
    first = engine(parts, fleet)
    with opening(first):
        for version in (1, 2, 3):
            update(first, parts, tmp_path / "first", version)
    second = engine(parts, fleet)
    with opening(second):
        assert (second.get_version(), second.scheduler.version) == (0, 3)
        with pytest.raises(ConfigError, match="no weights were brought in since version 0"):
            second.set_version(40)
        meta = parts.Meta(type="disk", path=str(tmp_path / "v40"))
        future = second.update_weights_from_disk(meta)
        saved(parts, second.config, 0, Path(meta.path))
        future.result(60)
        second.set_version(40)
        workflow = SingleTurn(parts)
        (trajectory, *_) = second.prepare_batch(Loader(), workflow, group_size=SIZE)
        assert set(trajectory["versions"].flatten().tolist()) == {-1, 40}
        assert {version for _, version, _ in workflow.seen} == {40}
        assert set(workflow.seen[0][2].output_versions) == {40}


class Picky(SingleTurn):
    """It keeps no response of odd items, and every second one of the others."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        made = await super().arun_episode(engine, data)
        return None if data["number"] % 2 or len(self.seen) % 2 else made


def test_what_a_workflow_does_not_keep_is_left_out(parts: SimpleNamespace, opened: RolloutEngine):
    batch = opened.prepare_batch(Loader(), Picky(parts), group_size=SIZE)
    assert len(batch) == GROUPS
    assert all(0 < len(each["rewards"]) <= SIZE for each in batch)
    assert any(len(each["rewards"]) < SIZE for each in batch)
    assert all((each["input_ids"][:, 2] % 2 == 1).all() for each in batch), "7 + an even number"


@pytest.mark.parametrize("dynamic", [False, True])
def test_rejected_groups_are_replaced_or_missing(parts: SimpleNamespace, dynamic: bool):
    """With `dynamic_bs` a batch is smaller in their place."""
    made = engine(parts)

    def accept(trajectory: dict[str, Any]) -> bool:
        return int(trajectory["input_ids"][0, 2]) % 2 == 0

    with opening(made):
        taken = [
            made.prepare_batch(
                Loader(),
                SingleTurn(parts),
                should_accept_fn=accept,
                group_size=SIZE,
                dynamic_bs=dynamic,
            )
            for _ in range(4)
        ]
    assert all(accept(trajectory) for batch in taken for trajectory in batch)
    if dynamic:
        assert 0 < sum(map(len, taken)) < 4 * GROUPS
    else:
        assert [len(batch) for batch in taken] == [GROUPS] * 4


class MultiTurn(SingleTurn):
    """Three requests, each after the response and some tokens of the environment."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        tokens, mask = list(data["ids"]), [0] * 3
        for turn in range(3):
            if turn:
                tokens += [9, 9]
                mask += [0, 0]
            request = self.parts.Request(input_ids=list(tokens), gconfig=self.gconfig.new())
            response = await engine.agenerate(request)
            tokens += response.output_tokens
            mask += [1] * len(response.output_tokens)
        return {
            "input_ids": torch.tensor([tokens]),
            "loss_mask": torch.tensor([mask]),
            "rewards": torch.tensor([1.0]),
        }


def test_a_workflow_of_several_turns(parts: SimpleNamespace, opened: RolloutEngine):
    (trajectory, *_) = opened.prepare_batch(Loader(), MultiTurn(parts), group_size=SIZE)
    row = trajectory["loss_mask"][0].tolist()
    turns = sum(before < after for before, after in zip([0, *row], row, strict=False))
    assert turns == 3
    assert trajectory["rewards"].tolist() == [1.0] * SIZE


class Routed(SingleTurn):
    """It gives the trainer the experts of each position, and a row of its own. Some responses are
    far longer than others."""

    started = 0

    def trajectory(self, response: Any, reward: float) -> Any:
        experts = response.routed_experts
        assert experts.dtype == np.int32
        rows = torch.from_numpy(np.pad(experts, ((0, 1), (0, 0))))  # The last token has no row.
        made = super().trajectory(response, reward)
        number = torch.tensor([response.input_tokens[-1]])
        return {**made, "routed_experts": rows[None], "number": number}

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        self.started += 1
        self.gconfig.max_new_tokens = 40 + 400 * (self.started % 7 == 0)
        return await super().arun_episode(engine, data)


class Varied(SingleTurn):
    """Its responses have different lengths, and so different rewards."""

    asked = 0

    @property
    def gconfig(self) -> Any:
        self.asked += 1
        return self.parts.Generation(max_new_tokens=10 + self.asked * 61 % 150)

    @gconfig.setter
    def gconfig(self, usual: Any) -> None: ...


class VariedTurns(Varied, MultiTurn):
    """Three requests, and a reward that depends on the length."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        made = await MultiTurn.arun_episode(self, engine, data)
        return {**made, "rewards": torch.tensor([float(made["input_ids"].shape[1] % 5)])}


class Forgetful(Varied):
    """It keeps two of three responses, and rewards them highly."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        made = await super().arun_episode(engine, data)
        return made if len(self.seen) % 3 else None

    async def reward(self, data: dict[str, Any], response: Any) -> float:
        return 100.0 + len(response.output_tokens) % 7


def trainer_config(**changes: Any) -> Any:
    """AReaL's own configuration of a trainer whose advantages are rewards minus values."""
    from areal.api import cli_args

    actor: Any = {"kl_ctl": 0.0, "reward_clip": 1000.0, **changes}
    critic = cli_args.PPOCriticConfig() if actor.pop("critic", False) else None
    norm = cli_args.NormConfig(mean_level="group", std_level="group", group_size=SIZE)
    actor = {name: norm if name.endswith("norm") else each for name, each in actor.items()}
    return cli_args.PPOConfig(actor=cli_args.PPOActorConfig(**actor), critic=critic)


def sampling_engine(parts: Any, trainer: Any, **settings: Any) -> RolloutEngine:
    return RolloutEngine(
        SimFleet(2, time_scale=0.01),
        config=config(parts),
        gconfig=parts.Generation(n_samples=SIZE),
        settings=SchedulerConfig(
            **{"over_provision": 2.0, "pace": "asynchronous", "delivery": "samples", **settings}
        ),
        trainer=trainer,
    )


@pytest.mark.shows("single samples", engine="embedded", adapter="AReaL")
@pytest.mark.parametrize("kind", [Varied, VariedTurns, Forgetful])
def test_areals_advantage_of_a_sample_is_from_its_siblings(
    parts: SimpleNamespace, tmp_path: Path, kind: Any
):
    from areal.trainer.ppo.actor import PPOActor

    trainer = trainer_config(use_decoupled_loss=True)
    made = sampling_engine(parts, trainer)
    batches: list[Batch] = []
    following = made.scheduler.next_batch

    def next_batch(**given: Any) -> Batch:
        batches.append(following(**given))
        return batches[-1]

    made.scheduler.next_batch = next_batch
    loader, workflow, ages = Loader(), kind(parts), set[int]()
    seen = set[float]()
    with opening(made):
        for version in range(6):
            trajectories = made.prepare_batch(loader, workflow, group_size=SIZE)
            assert len(trajectories) == GROUPS * SIZE
            # AReaL computes its own log-probabilities in between.
            data = [{**each, "prox_logp": each["logprobs"]} for each in trajectories]
            expected = advantages(batches[-1]).tolist()
            actor = PPOActor(trainer.actor, None)
            for each, sample, advantage in zip(
                actor.compute_advantages(data), batches[-1].samples, expected, strict=True
            ):
                assert len(sample.siblings) == SIZE // 2
                sampled = each["loss_mask"].bool()
                assert int(sampled.sum()) == int(sample.rollout.loss_mask.sum())
                assert each["rewards"].tolist() == [sample.reward]
                assert torch.allclose(each["advantages"][sampled], torch.tensor(advantage))
                own = sample.rollout.versions
                assert torch.equal(
                    each["versions"][each["versions"] >= 0], torch.tensor(own[own != NO_VERSION])
                )
                ages |= set((version - own[sample.rollout.loss_mask]).tolist())
                seen.add(advantage)
            update(made, parts, tmp_path, version + 1)
        evaluated = made.rollout_batch(loader.items[:2], SingleTurn(parts), group_size=SIZE)
    check(evaluated)
    samples = [sample for batch in batches for sample in batch.samples]
    assert len({sample.unit_id for sample in samples}) == 6 * GROUPS * SIZE
    assert ages <= {0, 1, 2}
    assert len(seen) > 2
    if kind is Forgetful:
        rewards = [each.reward for sample in samples for each in (sample, *sample.siblings)]
        assert all(reward is not None and reward >= 100 for reward in rewards)


@each_row(
    ("changes", "error"),
    [
        (None, "set trainer=self.config"),
        ({"critic": True}, "critic is set, and an advantage is"),
        ({"reward_norm": True}, "actor.reward_norm is set"),
        ({"adv_norm": True}, "actor.adv_norm is set"),
        ({"reward_scaling": 2.0}, "actor.reward_scaling is set"),
        ({"reward_bias": -0.5}, "actor.reward_bias is set"),
        ({"overlong_reward_penalty": True}, "actor.overlong_reward_penalty is set"),
        ({"mask_no_eos_with_zero": True}, "actor.mask_no_eos_with_zero is set"),
        ({"discount": 0.99}, "actor.discount is set"),
        ({"gae_lambda": 0.95}, "actor.gae_lambda is set"),
    ],
)
def test_settings_that_change_a_samples_advantage_are_refused(
    parts: SimpleNamespace, changes: dict[str, Any] | None, error: str
):
    with pytest.raises(ConfigError, match=error):
        sampling_engine(parts, None if changes is None else trainer_config(**changes))


def test_a_filter_of_groups_is_refused_with_samples(parts: SimpleNamespace):
    with (
        opening(sampling_engine(parts, trainer_config())) as made,
        pytest.raises(ConfigError, match="should_accept_fn judges whole groups"),
    ):
        made.prepare_batch(Loader(), SingleTurn(parts), should_accept_fn=any, group_size=SIZE)


@pytest.mark.shows("routed experts", engine="embedded", adapter="AReaL")
def test_routed_experts_and_what_a_workflow_adds_reach_the_trainer(
    parts: SimpleNamespace, tmp_path: Path
):
    """The experts are those of the pass that sampled each token, across updates."""
    settings = SchedulerConfig(
        over_provision=2.0, pace="asynchronous", straggler="abort", companions=(EXPERTS,)
    )
    fleet = SimFleet(2, time_scale=0.1)
    made = engine(parts, fleet, settings, return_routed_experts=True)
    several, keys = 0, {0: weights_key_of_version(0)}
    with opening(made):
        loader, workflow = Loader(), Routed(parts)
        for version in range(40):
            if several:
                break
            for trajectory in made.prepare_batch(loader, workflow, group_size=SIZE):
                assert len(set(trajectory["number"].tolist())) == 1
                for row in range(SIZE):
                    shown = trajectory["versions"][row][trajectory["attention_mask"][row]]
                    versions = shown[3:]  # Three tokens of the prompt.
                    sampled_by = np.array([keys[int(each)] for each in versions], np.uint64)
                    places = np.arange(2, 2 + len(versions))
                    expected = toy_rows(EXPERTS, places, sampled_by).values
                    found = trajectory["routed_experts"][row, places].numpy()
                    assert (found == expected.reshape(len(versions), -1)).all()
                    several += len(set(versions.tolist())) > 1
            meta = update(made, parts, tmp_path, version + 1)
            keys[version + 1] = zlib.crc32(meta.path.encode())  # that saved() has written
    assert several, "no response met an update"


IMAGE = 99
"""Id of the placeholder of images."""


class Processor:
    """Expands the placeholder of each image into three."""

    image_token_id = IMAGE

    def __call__(self, *, images: Any, text: Any, **_: Any) -> dict[str, Any]:
        ids = [token for each in text for token in ([each] if each != IMAGE else [IMAGE] * 3)]
        return {
            "input_ids": torch.tensor([ids]),
            "mm_token_type_ids": (torch.tensor([ids]) == IMAGE).int(),
            "pixel_values": torch.full((len(images), 4), 0.5),
            "image_grid_thw": torch.tensor([[1, 2, 2]] * len(images)),
        }


def reward_of_images(completion_ids: list[int], **_: Any) -> float:
    return float(len(completion_ids) % 7)


@pytest.mark.shows("images", engine="embedded", adapter="AReaL")
def test_images_reach_the_engine_once_and_the_trainer_expanded(parts: SimpleNamespace):
    """The engine expands one placeholder for each image, and the trainer's tokens have three."""
    from areal.infra import check_trajectory_format
    from areal.workflow.vision_rlvr import VisionRLVRWorkflow
    from PIL import Image

    sent: list[do.Send] = []
    listener: Any = SimpleNamespace(
        on_event=lambda event, now: None,
        on_command=lambda command, now: sent.append(command) if isinstance(command, do.Send) else 0,
    )
    made = engine(parts, listeners=[listener])
    workflow = VisionRLVRWorkflow(
        reward_of_images,
        parts.Generation(max_new_tokens=40),
        tokenizer=SimpleNamespace(decode=str, eos_token_id=0, pad_token_id=0),
        processor=Processor(),
        enable_thinking=False,
    )
    loader = Loader()
    for item in loader.items:
        item["images"] = [Image.new("RGB", (2, 2)) for _ in range(2)]
        item["messages"] = [5, 6, IMAGE, 7, IMAGE, 8]
    expanded = [5, 6, *[IMAGE] * 3, 7, *[IMAGE] * 3, 8]
    with opening(made):
        (trajectory, *_) = made.prepare_batch(loader, workflow, group_size=SIZE)
    assert {tuple(each.input_ids[:6].tolist()) for each in sent} == {(5, 6, IMAGE, 7, IMAGE, 8)}
    assert {len(each.media) for each in sent} == {2}
    assert trajectory["input_ids"][:, : len(expanded)].tolist() == [expanded] * SIZE
    lengths = trajectory["loss_mask"].sum(-1)
    assert not trajectory["loss_mask"][:, : len(expanded)].any()
    assert trajectory["loss_mask"][:, len(expanded) :].sum(-1).tolist() == lengths.tolist()
    counted = trajectory["loss_mask"].bool()
    assert (trajectory["logprobs"][counted] < 0).any()
    assert (trajectory["versions"][counted] == 0).all()
    assert trajectory["mm_token_type_ids"].shape == trajectory["input_ids"].shape
    assert trajectory["mm_token_type_ids"].sum(-1).tolist() == [6] * SIZE
    assert len(trajectory["multi_modal_input"]) == SIZE
    assert trajectory["rewards"].tolist() == (lengths % 7).tolist()
    assert check_trajectory_format(trajectory, batch_size=SIZE)


class Agent:
    """An agent in the form of AReaL's own, which asks twice by OpenAI's client."""

    def __init__(self, by_response: bool = False) -> None:
        self.by_response = by_response

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> Any:
        assert "http_client" in extra_kwargs
        url, key = extra_kwargs["base_url"], extra_kwargs["api_key"]
        messages: Any = [{"role": "user", "content": f"w{5 + data['number']}"}]
        rewards: dict[str, float] = {}
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            for turn in range(2):
                received = await client.chat.completions.create(
                    model="default", messages=messages, max_tokens=20
                )
                messages += [
                    received.choices[0].message.model_dump(exclude_none=True),
                    {"role": "user", "content": "w9"},
                ]
                rewards[received.id] = 0.25 + turn
        return rewards if self.by_response else 1.25


@pytest.mark.shows("sessions and agents", engine="embedded", adapter="AReaL")
@pytest.mark.parametrize("by_response", [False, True])
def test_an_agent_gets_the_url_of_a_session(
    parts: SimpleNamespace, tmp_path: Path, by_response: bool
):
    from tests.support.trl_on_cpu import tokenizer

    tokenizer().save_pretrained(tmp_path / "model")
    fleet = SimFleet(2, time_scale=0.01, vocab_size=512)
    made = engine(parts, fleet, tokenizer_path=str(tmp_path / "model"))
    with opening(made):
        agent = Agent(by_response)
        for _ in range(2):
            batch = made.prepare_batch(Loader(), agent, group_size=SIZE)
            assert len(batch) == GROUPS
            for trajectory in batch:
                assert trajectory["rewards"].tolist() == [1.25] * SIZE
                # Two answers, each of at most 20 tokens.
                assert all(2 <= count <= 40 for count in trajectory["loss_mask"].sum(dim=1))
                sampled = (trajectory["versions"] >= 0) & trajectory["attention_mask"].bool()
                assert sampled.equal(trajectory["loss_mask"].bool())
        assert made.submit({"number": 3}, agent, is_eval=True)
        (found,) = made.wait(1)
        assert found is not None
        assert found["rewards"].tolist() == [1.25]


def test_evaluations_are_in_the_order_of_their_items(parts: SimpleNamespace, opened: RolloutEngine):
    opened.prepare_batch(Loader(), SingleTurn(parts), group_size=SIZE)
    workflow = SingleTurn(parts, greedy=True)
    items = Loader(items=5).items
    numbers = [opened.submit(item, workflow, group_size=2, is_eval=True) for item in items]
    assert len(set(numbers)) == 5
    found = opened.wait(5)
    assert [int(each["input_ids"][0, 2]) for each in found if each is not None] == [
        item["ids"][2] for item in items
    ]
    assert {context.is_eval for context, *_ in workflow.seen} == {True}
    for each in found:
        assert each is not None
        check([each], size=2)
    batch = opened.rollout_batch(items[:2], workflow, group_size=1)
    assert [int(each["input_ids"][0, 2]) for each in batch] == [7, 8]
    with pytest.raises(ConfigError, match="1 items are waited for, and 0 were submitted"):
        opened.wait(1)
    opened.submit(items[0], workflow)
    with pytest.raises(ConfigError, match="with a timeout"):
        opened.wait(1, timeout=1.0)


@pytest.mark.parametrize(
    ("sampling", "more", "change", "cause"),
    [
        ({"n_samples": 2}, {}, None, "set gconfig.n_samples to 1"),
        ({"use_beam_search": True}, {}, None, "a beam search"),
        ({}, {"image_data": ["..."]}, None, "1 images and 0 rows of the placeholder None"),
        ({"max_tokens": 3}, {}, None, "raise max_tokens"),
        ({}, {}, lambda t: {**t, "scores": [1, 2]}, "scores .* has not one row"),
        ({}, {}, lambda t: "a text", "returned str, without input_ids and rewards"),
        ({}, {}, lambda t: {**t, "input_ids": t["input_ids"] + 1}, "other tokens"),
        ({}, {}, lambda t: {**t, "loss_mask": t["loss_mask"] * 0}, "another loss mask"),
    ],
)
def test_requests_and_trajectories_that_would_be_lost_are_refused(
    parts: SimpleNamespace,
    opened: RolloutEngine,
    sampling: dict[str, Any],
    more: dict[str, Any],
    change: Any,
    cause: str,
):
    class Telling(SingleTurn):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            request = parts.Request(input_ids=list(data["ids"]), gconfig=self.gconfig.new(), **more)
            trajectory = self.trajectory(await engine.agenerate(request), 1.0)
            return trajectory if change is None else change(trajectory)

    assert opened.submit(Loader().items[0], Telling(parts, **sampling))
    assert opened.wait(1) == [None]
    (entry,) = opened.scheduler.state.in_flight.ledger.entries
    assert re.search(cause, entry.cause), entry.cause


def test_parameters_of_sampling_reach_the_engine(parts: SimpleNamespace, opened: RolloutEngine):
    from aprilsched.trainers.areal import _sampling

    given = parts.Generation(
        greedy=True,
        max_tokens=20,
        min_new_tokens=30,
        stop=["</answer>"],
        stop_token_ids=[3],
        frequency_penalty=0.5,
        top_p=0.9,
    )
    made = _sampling(parts.Request(input_ids=[1] * 8, gconfig=given))
    assert (made.temperature, made.max_new_tokens, made.min_new_tokens) == (0.0, 12, 12)
    assert (made.top_p, made.stop_token_ids) == (0.9, (3,))
    assert made.extra == {
        "skip_special_tokens": True,
        "stop": ["</answer>"],
        "frequency_penalty": 0.5,
    }


@pytest.mark.lacks("LoRA adapters", adapter="AReaL", why="Requests would not name the adapter.")
@each_row(
    ("areals", "settings", "error"),
    [
        ({"use_lora": True}, {}, "use_lora is set"),
        ({"return_routed_experts": True}, {}, "does not know the shape of the rows"),
        ({}, {"max_staleness": 3}, "raise max_head_offpolicyness"),
    ],
)
def test_settings_that_contradict_areals_are_refused(
    parts: SimpleNamespace, areals: dict[str, Any], settings: dict[str, Any], error: str
):
    with pytest.raises(ConfigError, match=error):
        engine(parts, settings=SchedulerConfig(**settings), **areals)


@each_row(
    ("given", "changes", "error"),
    [
        ({"group_size": SIZE + 1}, {}, "group_size is 5, and gconfig.n_samples was 4"),
        ({"dataloader": Loader(batch_size=2)}, {}, "gives 2 items at a time"),
        ({"dataloader": Loader(items=0)}, {}, "gives no items"),
        ({"workflow": lambda data: None}, {}, "has no arun_episode"),
        ({"workflow": Agent()}, {"tokenizer_path": ""}, "needs the model's tokenizer"),
        (
            {"workflow": Agent()},
            {"agent": SimpleNamespace(mode="subproc")},
            "agent.mode is 'subproc'",
        ),
    ],
)
def test_batches_that_cannot_be_are_refused(
    parts: SimpleNamespace, given: dict[str, Any], changes: dict[str, Any], error: str
):
    usual = {"dataloader": Loader(), "workflow": SingleTurn(parts), "group_size": SIZE}
    with opening(engine(parts, **changes)) as made, pytest.raises(ConfigError, match=error):
        made.prepare_batch(**{**usual, **given})


def test_updates_that_cannot_be_are_refused(parts: SimpleNamespace, opened: RolloutEngine):
    xccl = parts.Meta(type="xccl", nccl_group_name="group")
    adapter = parts.Meta(type="disk", path="weights", use_lora=True)
    own = [engine(parts, settings=SchedulerConfig(straggler=s)) for s in ("retract", "abort")]
    for error, call, *args in (
        (
            "let one process drive the trainer",
            lambda: opened.initialize(train_data_parallel_size=4),
        ),
        ("a LoRA adapter", opened.update_weights_from_disk, adapter),
        ("a LoRA adapter", opened.init_weights_update_group, adapter),
        ("the engines are in no group", opened.update_weights_from_distributed, xccl, []),
        ('set straggler="abort" or "run"', own[0].init_weights_update_group, xccl),
        ("sim-0, sim-1 take no broadcast", own[1].init_weights_update_group, xccl),
    ):
        with pytest.raises(ConfigError, match=error):
            call(*args)


def test_areals_settings_are_those_of_the_scheduler(parts: SimpleNamespace):
    made = engine(parts, max_concurrent_rollouts=5).settings
    assert (made.batch_groups, made.group_size, made.max_staleness) == (GROUPS, SIZE, 2)
    assert made.dispatch.max_in_flight == 5 * SIZE
    own = SchedulerConfig(
        max_staleness=Staleness(1, rule="evict"), dispatch=Dispatch(max_in_flight=7)
    )
    made = engine(parts, settings=own, max_concurrent_rollouts=5).settings
    assert made.max_staleness == Staleness(1, rule="evict")
    assert made.dispatch.max_in_flight == 7


def test_the_trainer_can_use_the_engines_memory(
    parts: SimpleNamespace, opened: RolloutEngine, tmp_path: Path
):
    """AReaL's order where trainer and engines are on the same GPUs."""
    for version in (1, 2):
        check(opened.prepare_batch(Loader(), SingleTurn(parts), group_size=SIZE))
        opened.pause()
        opened.pause_generation()
        opened.offload()
        assert opened.scheduler.state.fleet.sleep is not None
        update(opened, parts, tmp_path, version)
        opened.onload()
        opened.continue_generation()
        opened.resume()
        assert opened.scheduler.state.fleet.sleep is None


@pytest.fixture
def broadcasting(
    parts: SimpleNamespace, start_sglang_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[RolloutEngine, Client, list[ThreadedServer]]]:
    """An engine of two servers in AReaL's group."""
    client = Client()
    monkeypatch.setattr("areal.engine.RemoteSGLangEngine", client)
    servers = [start_sglang_server() for _ in range(2)]
    made = engine(
        parts,
        SGLangFleet([server.url for server in servers]),
        settings=SchedulerConfig(straggler="abort", pace="asynchronous"),
    )
    made.initialize()
    made.init_weights_update_group(parts.Meta(type="xccl", nccl_group_name="group")).result()
    yield made, client, servers
    made.destroy()


def test_a_broadcast_is_one_update_whatever_the_number_of_its_buckets(
    parts: SimpleNamespace, broadcasting: tuple[RolloutEngine, Client, list[ThreadedServer]]
):
    made, client, servers = broadcasting
    names = [server.url.removeprefix("http://") for server in servers]
    assert client.calls == [("initialize", names), ("group", "group")]
    for version in (1, 2):
        check(made.prepare_batch(Loader(), SingleTurn(parts), group_size=SIZE))
        made.pause_generation()
        meta = parts.Meta(type="xccl", nccl_group_name="group", version=version)
        for bucket in range(3):
            made.update_weights_from_distributed(meta, [bucket]).result()
            modes = {control.mode for control in made.scheduler.state.fleet.control.all()}
            assert {mode.value for mode in modes} == {"refitting"}
        made.continue_generation()
        made.set_version(version)
        assert made.get_version() == version
    assert [what for what, _ in client.calls].count("bucket") == 6
    made.continue_generation()  # Nothing is under way.


def test_a_bucket_that_fails_ends_the_update_and_the_next_one_repairs_it(
    parts: SimpleNamespace, broadcasting: tuple[RolloutEngine, Client, list[ThreadedServer]]
):
    made, client, _ = broadcasting
    meta = parts.Meta(type="xccl", nccl_group_name="group")
    client.error = OSError("the network is gone")
    with pytest.raises(OSError, match="the network is gone"):
        made.update_weights_from_distributed(meta, []).result()
    with pytest.raises(RefitError, match="the network is gone"):
        made.continue_generation()
    with pytest.raises(ConfigError, match="no weights were brought in"):
        made.set_version(1)
    client.error = None
    made.update_weights_from_distributed(meta, []).result()
    made.continue_generation()
    made.set_version(1)
    check(made.prepare_batch(Loader(), SingleTurn(parts), group_size=SIZE))


def test_an_engine_that_left_the_group_is_noticed_before_the_broadcast(
    parts: SimpleNamespace, broadcasting: tuple[RolloutEngine, Client, list[ThreadedServer]]
):
    made, client, servers = broadcasting
    name = servers[1].url.removeprefix("http://")
    lose(made, name)
    meta = parts.Meta(type="xccl", nccl_group_name="group")
    with pytest.raises(RefitError, match=f"{name} does not take part"):
        made.update_weights_from_distributed(meta, [])
    assert not [what for what, _ in client.calls if what == "bucket"]


def lose(made: RolloutEngine, name: str) -> None:
    from aprilsched.kernel.core.messages.events import EngineLost

    asynchronous = made.scheduler._here

    async def feed() -> None:
        asynchronous._feed(EngineLost(engine=name, cause="given up by the test"))

    made.scheduler._wait(feed)


def test_the_trainers_processes_ask_for_updates_over_http(
    parts: SimpleNamespace, opened: RolloutEngine, tmp_path: Path
):
    from areal.infra.rpc.serialization import serialize_value

    opened.prepare_batch(Loader(), SingleTurn(parts), group_size=SIZE)
    meta = parts.Meta(type="disk", path=str(tmp_path / "v1"), version=1)
    saved(parts, opened.config, 0, Path(meta.path))
    assert post(opened, "pause_generation", {}) == {"status": "ok"}
    body = {"meta": serialize_value(meta)}
    assert post(opened, "update_weights_disk", body) == {"status": "ok"}
    assert post(opened, "continue_generation", {}) == {"status": "ok"}
    opened.set_version(1)
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(opened, "update_weights_xccl", {**body, "param_specs": []})
    with refused.value as answer:
        assert "the engines are in no group" in json.loads(answer.read())["error"]


def post(opened: RolloutEngine, call: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://{opened.callback_addr}/callback/{call}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_without_areal_it_is_named():
    program = (
        "import sys; sys.modules['areal'] = None\n"
        "from aprilsched.trainers.areal import _imported\n"
        "_imported('a.path')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "MissingExtra: AReaL cannot be imported" in ended.stderr.splitlines()[-1]
