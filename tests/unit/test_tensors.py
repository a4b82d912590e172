"""Tests the torch tensors of a batch: each token is in its place, and padding is marked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.companions import Companion, CompanionRows, Rows
from aprilsched.trainers.tensors import PackedTensors, PaddedTensors, RaggedTensor
from aprilsched.types import Batch, Group, Prompt, Rollout, Segment
from tests.support.table import each_row

PAD = 99
PER_TOKEN = ("input_ids", "position_ids", "response_mask", "loss_mask", "logprobs", "versions")
PER_ROLLOUT = ("prompt_lengths", "response_lengths", "rewards", "group_ids")
DTYPES = {
    "input_ids": torch.int64,
    "attention_mask": torch.int64,
    "position_ids": torch.int64,
    "response_mask": torch.bool,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "versions": torch.int64,
    "prompt_lengths": torch.int64,
    "response_lengths": torch.int64,
    "rewards": torch.float32,
    "group_ids": torch.int64,
}


def pad(given: Batch) -> PaddedTensors:
    tensors = given.to_torch(pad_id=PAD)
    assert isinstance(tensors, PaddedTensors)
    return tensors


def pack(given: Batch) -> PackedTensors:
    tensors = given.to_torch(packed=True)
    assert isinstance(tensors, PackedTensors)
    return tensors


def rollout(group_id: int, index: int, prompt: int, response: int, reward: float | None) -> Rollout:
    """A response whose third token came from an environment and whose first is too stale."""
    place = np.arange(response, dtype=np.int32)
    sampled = place != 2
    versions = np.where(sampled, 4 + (place > 4), -1).astype(np.int32)
    arrays: dict[str, Any] = {
        "prompt_ids": np.arange(10, 10 + prompt, dtype=np.int32),
        "token_ids": place + 1000 * (group_id + 1) + 100 * index,
        "logprobs": np.where(sampled, -0.25 * (place + 1), 0).astype(np.float32),
        "versions": versions,
        "loss_mask": sampled & (place > 0),
    }
    for array in arrays.values():
        array.flags.writeable = False
    return Rollout(
        rollout_id=10 * group_id + index,
        group_id=group_id,
        index=index,
        segments=(Segment(start=0, end=response, version=4, engine="a"),),
        versions_exact=True,
        finish_reason="stop",
        reward=reward,
        **arrays,
    )


def batch(shapes: Sequence[Sequence[tuple[int, int]]]) -> Batch:
    """Groups of rollouts with (prompt, response) tokens; every second one has no reward."""
    groups = tuple(
        Group(
            group_id=g,
            prompt=Prompt(input_ids=np.array([1], dtype=np.int32)),
            rollouts=tuple(
                rollout(g, i, p, r, None if i % 2 else 0.5 + g) for i, (p, r) in enumerate(group)
            ),
        )
        for g, group in enumerate(shapes)
    )
    return Batch(index=0, version=5, groups=groups)


RAGGED = batch([[(3, 7), (3, 1)], [(5, 0), (5, 12)]])
SHAPES = {
    "ragged": RAGGED,
    "one rollout": batch([[(1, 1)]]),
    "no response tokens": batch([[(4, 0)]]),
    "no response tokens anywhere": batch([[(4, 0), (2, 0)]]),
    "nothing": batch([]),
}
every_shape = pytest.mark.parametrize("given", SHAPES.values(), ids=SHAPES.keys())


@every_shape
def test_a_padded_row_gives_the_rollout_back(given: Batch):
    tensors = pad(given)
    for row, wanted in enumerate(given.rollouts):
        prompt, end = len(wanted.prompt_ids), len(wanted.prompt_ids) + len(wanted)
        ids = tensors.input_ids[row].numpy()
        np.testing.assert_array_equal(ids[:prompt], wanted.prompt_ids)
        np.testing.assert_array_equal(ids[prompt:end], wanted.token_ids)
        for name in ("logprobs", "versions", "loss_mask"):
            found = getattr(tensors, name)[row].numpy()
            np.testing.assert_array_equal(found[prompt:end], getattr(wanted, name))
        assert tensors.response_mask[row].nonzero().flatten().tolist() == [*range(prompt, end)]
        assert tensors.position_ids[row, :end].tolist() == [*range(end)]
        assert tensors.prompt_lengths[row] == prompt
        assert tensors.response_lengths[row] == len(wanted)
        assert tensors.group_ids[row] == wanted.group_id


@every_shape
def test_outside_of_a_response_everything_is_neutral(given: Batch):
    tensors = pad(given)
    lengths = tensors.prompt_lengths + tensors.response_lengths
    assert torch.equal(tensors.attention_mask.sum(1), lengths)
    padding = tensors.attention_mask == 0
    assert (tensors.input_ids[padding] == PAD).all()
    assert (tensors.position_ids[padding] == 0).all()
    outside = ~tensors.response_mask
    assert (tensors.versions[outside] == -1).all()
    assert (tensors.logprobs[outside] == 0).all()
    assert not tensors.loss_mask[outside].any()


@every_shape
def test_packed_is_padded_without_the_padding(given: Batch):
    padded, packed = pad(given), pack(given)
    taken = padded.attention_mask.bool()
    for name in PER_TOKEN:
        assert torch.equal(getattr(packed, name), getattr(padded, name)[taken]), name
    for name in PER_ROLLOUT:
        torch.testing.assert_close(getattr(packed, name), getattr(padded, name), equal_nan=True)
    lengths = padded.attention_mask.sum(1)
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.cu_seqlens[0] == 0
    assert torch.equal(packed.cu_seqlens.diff().long(), lengths)
    assert packed.max_seqlen == padded.input_ids.shape[1]


@every_shape
def test_dtypes_do_not_depend_on_the_batch(given: Batch):
    padded, packed = pad(given), pack(given)
    assert {name: getattr(padded, name).dtype for name in DTYPES} == DTYPES
    packed_names = (*PER_TOKEN, *PER_ROLLOUT)
    assert all(getattr(packed, name).dtype == DTYPES[name] for name in packed_names)


def test_a_missing_reward_is_nan():
    rewards = pad(RAGGED).rewards
    assert rewards[[0, 2]].tolist() == [0.5, 1.5]
    assert rewards[[1, 3]].isnan().all()


def test_the_tensors_are_the_callers_own():
    tensors = pack(RAGGED)
    tensors.input_ids.zero_()
    tensors.logprobs.zero_()
    first = next(RAGGED.rollouts)
    assert first.prompt_ids[0] == 10
    assert first.logprobs[0] == -0.25


def test_without_torch_the_message_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"torch is not installed; pip install .*\[torch\]'"):
        RAGGED.to_torch()


EXPERTS = Companion("routed_experts", "uint8", (3, 2))
MASK = Companion("sampling_mask")


def with_companions(given: Rollout) -> Rollout:
    """Row i of the experts is i; the sampling mask of response token i has i % 3 ids of its own."""
    prompt, tokens = len(given.prompt_ids), len(given)
    values = np.arange(prompt + tokens - 1, dtype=np.uint8)[:, np.newaxis, np.newaxis]
    exact = np.arange(tokens) % 4 != 3
    return msgspec.structs.replace(
        given,
        companions={
            "routed_experts": CompanionRows(
                EXPERTS, Rows(np.broadcast_to(values, (len(values), 3, 2))), exact
            ),
            "sampling_mask": CompanionRows(
                MASK,
                Rows.ragged([[int(t)] * (i % 3) for i, t in enumerate(given.token_ids)], "int32"),
                np.ones(tokens, dtype=np.bool_),
            ),
        },
    )


@each_row("packed", [False, True])
def test_companions_are_aligned_to_the_tokens(packed: bool) -> None:
    plain = batch([[(1, 6), (4, 3)], [(2, 1)]])
    groups = tuple(
        replace(group, rollouts=tuple(map(with_companions, group.rollouts)))
        for group in plain.groups
    )
    given = replace(plain, groups=groups)
    tensors = pack(given) if packed else pad(given)
    experts, masks = (tensors.companions[name] for name in ("routed_experts", "sampling_mask"))
    assert isinstance(experts, torch.Tensor)
    assert isinstance(masks, RaggedTensor)
    assert experts.dtype == torch.uint8
    assert experts.shape == (*tensors.input_ids.shape, 3, 2)
    assert len(masks.offsets) == tensors.input_ids.numel() + 1
    at = 0
    for row, rollout in enumerate(given.rollouts):
        prompt, size = len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout)
        low = at if packed else row * tensors.input_ids.shape[1]
        at += size
        own = experts.reshape(-1, 3, 2)[low : low + size]
        assert own[:, 0, 0].tolist() == [*range(size - 1), 0]
        exact = tensors.companions_exact["routed_experts"].reshape(-1)[low : low + size]
        expected = rollout.companions["routed_experts"].exact.tolist()
        assert exact.tolist() == [True] * prompt + expected
        for index in range(size):
            first, last = (int(masks.offsets[low + index + step]) for step in (0, 1))
            place = index - prompt
            kept = [int(rollout.token_ids[place])] * (place % 3) if place >= 0 else []
            assert masks.values[first:last].tolist() == kept


def test_a_batch_without_companions_has_none() -> None:
    assert pad(batch([[(1, 2)]])).companions == {}
    assert pack(batch([])).companions_exact == {}
