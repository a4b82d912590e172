"""TorchRL's own loss, advantage and replay buffer on batches of the scheduler."""

# pyright: basic
# The packages have no complete types.
from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from aprilsched import Batch, Group, Media, Prompt, Score, Segment, advantages
from aprilsched.errors import ConfigError
from aprilsched.kernel.values.companions import Companion, CompanionRows, Rows
from aprilsched.simulation.engine import SimConfig
from aprilsched.testing import SimServer, ThreadedServer
from aprilsched.trainers.corrections import clipped_loss, importance_weights
from aprilsched.trainers.torchrl import fill, to_tensordicts
from aprilsched.types import Rollout, Sample, Sibling

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchrl") is None, reason="could not import 'torchrl'"
)

VOCABULARY = 512
EXAMPLE = Path(__file__).parents[2] / "examples" / "torchrl_grpo.py"


@pytest.fixture(scope="module")
def torch() -> Iterator[Any]:
    """torch in one thread."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model and its tokenizer."""
    from tests.support.trl_on_cpu import write_model

    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def actor(folder: Path) -> Any:
    """TorchRL's policy on that model."""
    from torchrl.modules.llm import TransformersWrapper
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return TransformersWrapper(
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
    )


def rollout(
    group_id: int, index: int, tokens: int, *, score: Score | None, finish: Any = "stop"
) -> Rollout:
    """A response whose third token came from an environment and whose first is too stale."""
    random = np.random.default_rng([group_id, index])
    place = np.arange(tokens)
    sampled = place != 2
    return Rollout(
        rollout_id=10 * group_id + index,
        group_id=group_id,
        index=index,
        prompt_ids=np.arange(5, 8 + group_id, dtype=np.int32),
        token_ids=random.integers(5, VOCABULARY, tokens, dtype=np.int32),
        logprobs=np.where(sampled, -random.random(tokens) - 4, 0).astype(np.float32),
        versions=np.where(sampled, 4 + (place > 4), -1).astype(np.int32),
        loss_mask=sampled & (place > 0),
        segments=(Segment(start=0, end=tokens, version=4, engine="a"),),
        versions_exact=True,
        finish_reason=finish,
        reward=None if score is None else score.reward,
        reward_parts={} if score is None else score.parts,
    )


def batch(*groups: Sequence[Rollout]) -> Batch:
    prompt = Prompt(input_ids=np.array([5], dtype=np.int32))
    return Batch(
        index=0,
        version=6,
        units=tuple(
            Group(group_id=each[0].group_id, prompt=prompt, rollouts=tuple(each)) for each in groups
        ),
    )


def scored(*rewards: float, group_id: int = 0) -> list[Rollout]:
    """A group whose rollouts have these rewards and different lengths."""
    return [
        rollout(group_id, index, 6 + 3 * index, score=Score(reward=reward))
        for index, reward in enumerate(rewards)
    ]


RAGGED = batch(
    [
        rollout(0, 0, 7, score=Score(reward=1.0, parts={"format": 0.5})),
        rollout(0, 1, 12, score=Score(reward=0.0), finish="length"),
    ],
    scored(0.25, 0.75, group_id=1),
)


def test_every_entry_is_that_of_the_rollout(torch: Any):
    data = to_tensordicts(RAGGED)
    assert data.batch_size == (4,)
    for row, wanted in zip(data.unbind(0), RAGGED.rollouts, strict=True):
        before = len(wanted.prompt_ids)
        whole = np.concatenate([wanted.prompt_ids, wanted.token_ids])
        assert row["tokens", "full"].dtype == torch.int64
        assert np.array_equal(row["tokens", "full"], whole)
        assert row["masks", "all_attention_mask"].all()
        for key, given, outside in (
            (("log_probs", "full"), wanted.logprobs, 0),
            (("versions", "full"), wanted.versions, -1),
            (("masks", "all_assistant_mask"), wanted.loss_mask, False),
            (("staleness", "full"), np.where(wanted.versions < 0, 0, 6 - wanted.versions), 0),
        ):
            assert len(row[key]) == len(whole)
            assert np.array_equal(row[key][before:], given)
            assert (row[key][:before] == outside).all()
        assert row["next", "reward"].tolist() == [[wanted.reward]]
        assert row["next", "done"].tolist() == [True]
        assert row["next", "truncated"].tolist() == [wanted.finish_reason == "length"]
        assert row["next", "terminated"].tolist() == [wanted.finish_reason == "stop"]
        assert row["group_id"].tolist() == [wanted.group_id]
        assert row["rollout_id"].tolist() == [wanted.rollout_id]
        assert row["version"].tolist() == [6]
    parts = data["reward_parts", "format"].flatten()
    assert parts[0] == 0.5
    assert parts[1:].isnan().all()
    padded = data.get(
        ("tokens", "full"), as_padded_tensor=True, padding_side="left", padding_value=2
    )
    assert padded.shape == (4, 15)
    assert (padded[0, :5] == 2).all()


EXPERTS, MASK = Companion("routed_experts", "uint8", (2, 3)), Companion("sampling_mask")


@pytest.mark.shows("routed experts", "images", engine="embedded", adapter="TorchRL")
def test_companions_and_media_arrive_through_a_buffer(torch: Any):
    """Rows stay with their tokens, whatever the lengths."""
    from torchrl.data import LazyStackStorage, ReplayBuffer

    def carrying(of: Rollout) -> Rollout:
        size, tokens = len(of.prompt_ids) + len(of) - 1, len(of)
        values = np.arange(size * 6).reshape(size, 2, 3).astype(np.uint8)
        kept = [[int(token), 7][: 2 * int(token % 2)] for token in of.token_ids]
        exact = np.arange(tokens) != 1
        companions = {
            "routed_experts": CompanionRows(EXPERTS, Rows(values), exact),
            "sampling_mask": CompanionRows(MASK, Rows.ragged(kept, "int32"), exact),
        }
        return msgspec.structs.replace(of, companions=companions)

    groups = tuple(
        replace(
            group,
            prompt=replace(group.prompt, media=(Media("image", f"{group.group_id}.png"),)),
            rollouts=tuple(map(carrying, group.rollouts)),
        )
        for group in RAGGED.groups
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4)
    fill(buffer, replace(RAGGED, units=groups))
    by_id = {each.rollout_id: each for group in groups for each in group.rollouts}
    for row in buffer.sample().unbind(0):
        wanted = by_id[int(row["rollout_id"])]
        before, tokens = len(wanted.prompt_ids), len(wanted)
        experts = row["companions", "routed_experts"]
        rows = wanted.companions["routed_experts"].rows.values
        assert experts.dtype == torch.uint8
        assert np.array_equal(experts[:-1], rows)
        assert not experts[-1].any()
        values, offsets = (row["companions", "sampling_mask", of] for of in ("values", "offsets"))
        for place in range(before + tokens):
            own = values[offsets[place] : offsets[place + 1]].tolist()
            at = place - before
            kept = wanted.companions["sampling_mask"].rows
            assert own == (kept.row(at).tolist() if at >= 0 else [])
        for name in ("routed_experts", "sampling_mask"):
            exact = row["companions_exact", name]
            assert exact.tolist() == [place != before + 1 for place in range(before + tokens)]
        assert row["media"] == (Media("image", f"{wanted.group_id}.png"),)
    stacked = left(to_tensordicts(replace(RAGGED, units=groups)), "companions", "routed_experts")
    assert stacked.shape == (4, 15, 2, 3)


def test_a_batch_without_rewards_has_no_entry_for_them(torch: Any):
    given = batch([rollout(0, 0, 4, score=Score(reward=1.0)), rollout(0, 1, 5, score=None)])
    data = to_tensordicts(given)
    assert ("next", "reward") not in data.keys(True)
    assert data["next", "done"].all()


# --- the loss ------------------------------------------------------------------------------------


def left(data: Any, *key: str) -> Any:
    """An entry padded as TorchRL's losses pad it."""
    return data.get(key, as_padded_tensor=True, padding_side="left", padding_value=0)


def logprobs_of(torch: Any, actor: Any, data: Any) -> Any:
    """The model's log-probabilities, each sequence computed alone, padded on the left."""
    rows = []
    for row in data.unbind(0):
        ids = row["tokens", "full"]
        scores = actor.model(ids[None]).logits[0, :-1].log_softmax(-1)
        rows.append(torch.cat([scores[:1, 0] * 0, scores.gather(1, ids[1:, None])[:, 0]]))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")


@pytest.mark.parametrize("strategy", ["sft", "rlhf"])
def test_the_loss_counts_the_tokens_that_the_scheduler_counts(
    torch: Any, actor: Any, strategy: Any
):
    from torchrl.objectives.llm import GRPOLoss

    data = to_tensordicts(RAGGED)
    data["advantage"] = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None, None]
    loss = GRPOLoss(actor, masking_strategy=strategy, entropy_bonus=False, aggregation="none")
    theirs = loss(data).loss_objective[..., 0]
    mask = left(data, "masks", "all_assistant_mask")
    ours = clipped_loss(
        logprobs_of(torch, actor, data),
        left(data, "log_probs", "full"),
        data["advantage"][..., 0],
        mask,
    )
    assert mask.sum() == sum(int(each.loss_mask.sum()) for each in RAGGED.rollouts)
    assert (theirs[~mask] == 0).all()
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


def test_corrections_combine_with_the_loss(torch: Any, actor: Any):
    """Decoupled PPO: the trust region is around the proximal policy, and truncated weights of that
    against the behaviour policy are factors of the advantages."""
    from torchrl.objectives.llm import GRPOLoss

    data = to_tensordicts(RAGGED)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None]
    behaviour, mask = left(data, "log_probs", "full"), left(data, "masks", "all_assistant_mask")
    proximal = logprobs_of(torch, actor, data).detach() + 0.1
    weights = importance_weights(proximal, behaviour, mask, high=1.5)
    assert len(weights[mask].unique()) > 2
    data["proximal"] = proximal
    data["advantage"] = (advantages * weights)[..., None]
    loss = GRPOLoss(actor, entropy_bonus=False, aggregation="none")
    loss.set_keys(sample_log_prob="proximal")
    theirs = loss(data).loss_objective[..., 0]
    ours = clipped_loss(
        logprobs_of(torch, actor, data), proximal, advantages, mask, weights=weights
    )
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


# --- the buffer ----------------------------------------------------------------------------------


def buffer_with(*transforms: Any) -> Any:
    from torchrl.data import LazyStackStorage, ReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

    buffer = ReplayBuffer(
        storage=LazyStackStorage(64), sampler=SamplerWithoutReplacement(), batch_size=2
    )
    for transform in transforms:
        buffer.append_transform(transform)
    return buffer


def filled(torch: Any, given: Batch, size: int) -> Any:
    """What a buffer with TorchRL's advantage holds of a batch, in the order of the rollouts."""
    from torchrl.objectives.llm import MCAdvantage

    buffer = buffer_with(MCAdvantage(grpo_size=size, prompt_key="group_id"))
    fill(buffer, given)
    assert len(buffer) == sum(1 for _ in given.rollouts)
    data = buffer[:]
    return data[data["rollout_id"].flatten().argsort()]


def test_mcadvantage_takes_the_groups(torch: Any):
    given = batch(scored(1.0, 0.0, 0.5), scored(3.0, 3.0, 9.0, group_id=7))
    data = filled(torch, given, 3)
    rewards = torch.tensor([[1.0, 0.0, 0.5], [3.0, 3.0, 9.0]])
    wanted = (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)
    torch.testing.assert_close(data["advantage"].flatten(), wanted.flatten())
    for row, rollout in zip(data.unbind(0), given.rollouts, strict=True):
        assert np.array_equal(row["tokens", "full"][-len(rollout) :], rollout.token_ids)


def choosing(size: int, **settings: Any) -> Any:
    """TorchRL's advantage that chooses some rollouts of each group."""
    from torchrl.objectives.llm import MCAdvantage

    return MCAdvantage(size, prompt_key="group_id", trajectory_return="sum", **settings)


def single(units: Batch, *rewards: float) -> Batch:
    """The rollouts of a batch as samples, whose siblings have these rewards."""
    siblings = tuple(
        Sibling(rollout_id=90 + i, index=8 + i, reward=r) for i, r in enumerate(rewards)
    )
    prompt = Prompt(input_ids=np.array([5], dtype=np.int32))
    return replace(
        units,
        units=tuple(
            Sample(rollout=each, prompt=prompt, siblings=siblings) for each in units.rollouts
        ),
    )


@pytest.mark.shows("single samples", engine="embedded", adapter="TorchRL")
def test_samples_have_the_advantages_that_the_loss_reads(torch: Any, actor: Any):
    """The loss is that of the same advantages by hand. MCAdvantage would wait for whole groups."""
    from torchrl.data import LazyStackStorage, ReplayBuffer
    from torchrl.objectives.llm import GRPOLoss, MCAdvantage

    given = single(RAGGED, 0.5, 1.0)
    data = to_tensordicts(given)
    assert data["advantage"].flatten().tolist() == [0.25, -0.75, -0.5, 0.0]
    assert data["advantage"].dtype == torch.float32
    assert advantages(given).tolist() == [0.25, -0.75, -0.5, 0.0]
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=4)
    fill(buffer, given)
    assert len(buffer) == 4
    stored = buffer[:]
    assert stored["group_id"].flatten().tolist() == [0, 0, 1, 1]
    loss = GRPOLoss(actor, clip_epsilon=(0.2, 0.28), entropy_bonus=False)
    by_hand = to_tensordicts(RAGGED)
    by_hand["advantage"] = torch.tensor([0.25, -0.75, -0.5, 0.0]).reshape(4, 1, 1)
    assert loss(stored).loss_objective == loss(by_hand).loss_objective != 0
    assert to_tensordicts(single(RAGGED))["advantage"].flatten().tolist() == [0.0] * 4
    unscored = single(batch([rollout(0, 0, 7, score=None)]))
    assert "advantage" not in to_tensordicts(unscored).keys()
    assert "advantage" not in to_tensordicts(RAGGED).keys()
    buffer.append_transform(MCAdvantage(grpo_size=2, prompt_key="group_id"))
    with pytest.raises(ConfigError, match="leave MCAdvantage out of the buffer"):
        fill(buffer, given)
    assert len(buffer) == 4


def test_mcadvantage_chooses_among_the_rollouts_of_a_group(torch: Any):
    transform = choosing(2, candidate_group_size=4, candidate_selection_min_size=4)
    buffer = buffer_with(transform)
    fill(buffer, batch(scored(0, 0, 1, 0), scored(1, 1, 0, 1, group_id=3)))
    assert sorted(buffer[:]["group_id"].flatten().tolist()) == [0, 0, 3, 3]
    assert transform.queued_groups == 0


def test_dynamic_sampling_of_torchrl_drops_groups(torch: Any):
    transform = choosing(2, keep_return_bounds=(0.1, 0.9))
    buffer = buffer_with(transform)
    fill(buffer, batch(scored(1.0, 0.0), scored(1.0, 1.0, group_id=3)))
    assert sorted(buffer[:]["group_id"].flatten().tolist()) == [0, 0]
    assert transform.queued_groups == 0


def test_a_buffer_that_would_lose_rollouts_is_refused(torch: Any):
    from torchrl.objectives.llm import MCAdvantage

    unscored = batch([rollout(0, 0, 4, score=None), rollout(0, 1, 5, score=None)])
    for transform, given, error in (
        (MCAdvantage(3, prompt_key="group_id"), RAGGED, "takes 3 rollouts .* has groups of 2; set"),
        (choosing(2, candidate_group_size=4), batch(scored(1, 2, 3, 4)), "takes 2 to 4 rollouts"),
        (MCAdvantage(2), RAGGED, "has prompt_key='query'; give it prompt_key=\"group_id\""),
        (MCAdvantage(2, prompt_key="group_id"), unscored, "needs a reward of each rollout"),
    ):
        buffer = buffer_with(transform)
        with pytest.raises(ConfigError, match=error):
            fill(buffer, given)
        assert len(buffer) == transform.queued_trajectories == 0
    buffer = buffer_with()
    fill(buffer, unscored)
    assert len(buffer) == 2


def test_the_example_trains(
    torch: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = SimConfig(vocab_size=VOCABULARY, eos_token_id=0, stream_at_pause=False)
    with ThreadedServer(SimServer(config, time_scale=0.01)) as server:
        options = ["--engine", server.url, "--model", str(folder), "--steps", "3"]
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *options, "--weights", str(tmp_path)])
        main = runpy.run_path(str(EXAMPLE), run_name="example")["main"]
        assert main() == 4  # the initial weights are version 1
    versions = sorted(each.name for each in tmp_path.glob("version-*"))
    assert versions == ["version-00000003", "version-00000004"]
    first, second = (torch_weights(tmp_path / version) for version in versions)
    assert any(not torch.equal(first[name], second[name]) for name in first)


def torch_weights(checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")
