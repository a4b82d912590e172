"""Makes torch tensors of a batch for a trainer, padded to one length or packed into one row.

All tensors are aligned to ``input_ids``: ``logprobs[i]`` is the log-probability of token ``i``
itself, not of the next token. (A trainer that shifts its logits compares them with
``logprobs[1:]``.) The rows are the rollouts in the order of the batch, so each group stays
together.

torch is imported only when a function is called, so that a scheduler runs without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.values.companions import Companion, CompanionLog, CompanionRows, Rows
from aprilsched.kernel.values.extras import extra
from aprilsched.trainers.advantages import baselines
from aprilsched.types import Rollout, Unit

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PackedTensors", "PaddedTensors", "RaggedTensor", "pack", "pad"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RaggedTensor:
    """Rows of different lengths: row i is ``values[offsets[i]:offsets[i + 1]]``.

    Attributes:
        values: [n], the values of all rows.
        offsets: int64 [R + 1], of R rows: one for each entry of ``input_ids``, row by row.
    """

    values: Tensor
    offsets: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _BatchTensors:
    """The fields that both forms have; :class:`PaddedTensors` explains each."""

    input_ids: Tensor
    position_ids: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    versions: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    rewards: Tensor
    baseline: Tensor
    advantage: Tensor
    group_ids: Tensor
    companions: Mapping[str, Tensor | RaggedTensor]
    companions_exact: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PaddedTensors(_BatchTensors):
    """Tensors [B, S]: each row is a rollout, its prompt before its response, padded on the right.

    Attributes:
        input_ids: int64 [B, S], token ids; the pad id after the end.
        attention_mask: int64 [B, S], 1 for tokens, 0 for padding.
        position_ids: int64 [B, S], positions from 0 in each row; 0 for padding.
        response_mask: bool [B, S], True from the first response token to the last, including
            tokens that an environment added.
        loss_mask: bool [B, S], True for the response tokens that count in the loss.
        logprobs: float32 [B, S], log-probability under the version that sampled the token; 0
            elsewhere.
        versions: int64 [B, S], the policy version that sampled the token; -1 elsewhere.
        prompt_lengths: int64 [B], prompt tokens of each rollout.
        response_lengths: int64 [B], response tokens of each rollout.
        rewards: float32 [B], NaN for a rollout without a reward.
        baseline: float32 [B], mean reward of the other rollouts of the group, or of the siblings of
            a sample; NaN if there are none or one of their rewards is missing.
        advantage: float32 [B], reward minus baseline, see :func:`aprilsched.advantages`.
        group_ids: int64 [B], equal for the rollouts of one prompt.
        companions: each companion by name. One of the context is [B, S, ...]: entry i belongs to
            the pass over token i, which sampled token i + 1, and is 0 for the last token. One of
            tokens has at entry i what belongs to token i; "sampling_mask" is a
            :class:`RaggedTensor`.
        companions_exact: bool [B, S] by name, False for response tokens without the row of the pass
            that sampled them.
    """

    attention_mask: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedTensors(_BatchTensors):
    """Tensors [N]: all rollouts in one row without padding, N tokens in total.

    The fields are those of :class:`PaddedTensors` without the attention mask, with shape [N]
    instead of [B, S]. Two fields give the start of each rollout:

    Attributes:
        cu_seqlens: int32 [B + 1]; rollout b has the tokens ``cu_seqlens[b]`` to
            ``cu_seqlens[b + 1]``. Variable-length attention takes this form.
        max_seqlen: tokens of the longest rollout.
    """

    cu_seqlens: Tensor
    max_seqlen: int


def pad(
    rollouts: Sequence[Rollout],
    *,
    pad_id: int,
    no_version: int,
    units: Sequence[Unit] = (),
) -> PaddedTensors:
    """One row for each rollout, padded on the right with `pad_id`. Tokens that no policy version
    sampled have the version `no_version`. `units` contain the rollouts, in this order; without them
    no baseline is known.

    Raises:
        MissingExtra: if torch is not installed.
    """
    torch = _torch()
    lengths = _lengths(rollouts)
    taken = np.arange(int(lengths.max(initial=0))) < lengths[:, np.newaxis]
    fill = {"input_ids": pad_id, "versions": no_version}
    flat = _flat(rollouts, no_version)
    tokens = {name: _rows(values, taken, fill.get(name, 0)) for name, values in flat.items()}
    arrays = {**tokens, "attention_mask": taken.astype(np.int64)}
    arrays |= _per_rollout(rollouts, units)
    return PaddedTensors(
        **{name: torch.from_numpy(array) for name, array in arrays.items()},
        **_companions(torch, rollouts, lambda flat: _rows(flat, taken, 0)),
    )


def pack(
    rollouts: Sequence[Rollout],
    *,
    no_version: int,
    units: Sequence[Unit] = (),
) -> PackedTensors:
    """All rollouts in one row without padding; the other arguments are those of :func:`pad`.

    Raises:
        MissingExtra: if torch is not installed.
    """
    torch = _torch()
    lengths = _lengths(rollouts)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    arrays = {**_flat(rollouts, no_version), "cu_seqlens": starts}
    arrays |= _per_rollout(rollouts, units)
    tensors: dict[str, Tensor] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    companions = _companions(torch, rollouts, lambda flat: flat)
    return PackedTensors(**tensors, **companions, max_seqlen=int(lengths.max(initial=0)))


def _companions(
    torch: ModuleType,
    rollouts: Sequence[Rollout],
    lay_out: Callable[[NDArray[Any]], NDArray[Any]],
) -> dict[str, Any]:
    """Return the fields of companions.

    `lay_out` converts an array with one entry per token, one rollout after the other, to the shape
    of ``input_ids``.
    """
    found: dict[str, Any] = {}
    exact: dict[str, Tensor] = {}
    kinds = {name: each.companion for r in rollouts for name, each in r.companions.items()}
    for name, kind in kinds.items():
        own = [(r, r.companions.get(name) or _none(kind, r)) for r in rollouts]
        rows = Rows.join([each.aligned(prompt=len(rollout.prompt_ids)) for rollout, each in own])
        if rows.ends is None:
            found[name] = torch.from_numpy(lay_out(rows.values))
        else:
            lengths = lay_out(np.diff(rows.ends, prepend=0))
            offsets = np.concatenate(([0], np.cumsum(lengths)))
            found[name] = RaggedTensor(
                values=torch.from_numpy(rows.values), offsets=torch.from_numpy(offsets)
            )
        flat = _join((_after(rollout, each.exact, 1) for rollout, each in own), "?")
        exact[name] = torch.from_numpy(lay_out(flat))
    return {"companions": found, "companions_exact": exact}


def _none(kind: Companion, rollout: Rollout) -> CompanionRows:
    """Return the rows of a rollout whose prompt did not ask for this companion."""
    sampled = np.ones(len(rollout), np.bool_)
    return CompanionLog(kind).whole(prompt=len(rollout.prompt_ids), sampled=sampled)


def _torch() -> ModuleType:
    with extra("torch"):
        import torch
    return torch


def _lengths(rollouts: Iterable[Rollout]) -> NDArray[np.int64]:
    """Return the number of tokens of each rollout, prompt and response together."""
    return np.array([len(r.prompt_ids) + len(r) for r in rollouts], dtype=np.int64)


def _flat(rollouts: Sequence[Rollout], no_version: int) -> dict[str, NDArray[Any]]:
    """Every per-token field, with one rollout after the other. The arrays are new and writable."""
    return {
        "input_ids": _join((part for r in rollouts for part in (r.prompt_ids, r.token_ids)), "i8"),
        "position_ids": _join((np.arange(len(r.prompt_ids) + len(r)) for r in rollouts), "i8"),
        "response_mask": _join((_after(r, np.ones(len(r)), 0) for r in rollouts), "?"),
        "loss_mask": _join((_after(r, r.loss_mask, 0) for r in rollouts), "?"),
        "logprobs": _join((_after(r, r.logprobs, 0) for r in rollouts), "f4"),
        "versions": _join((_after(r, r.versions, no_version) for r in rollouts), "i8"),
    }


def _per_rollout(rollouts: Sequence[Rollout], units: Sequence[Unit]) -> dict[str, NDArray[Any]]:
    rewards = np.array([np.nan if r.reward is None else r.reward for r in rollouts])
    baseline = np.full(len(rollouts), np.nan)
    if units:
        # Each branch of a rollout has its baseline.
        rows = [1 + len(rollout.branches) for unit in units for rollout in unit.rollouts]
        baseline = np.repeat(baselines(units), rows)
    return {
        "baseline": baseline.astype(np.float32),
        "advantage": (rewards - baseline).astype(np.float32),
        "prompt_lengths": np.array([len(r.prompt_ids) for r in rollouts], dtype=np.int64),
        "response_lengths": np.array([len(r) for r in rollouts], dtype=np.int64),
        "rewards": rewards.astype(np.float32),
        "group_ids": np.array([r.group_id for r in rollouts], dtype=np.int64),
    }


def _join(parts: Iterable[NDArray[Any]], dtype: str) -> NDArray[Any]:
    """The parts in one row. An empty part goes first, because numpy refuses an empty list."""
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="unsafe")


def _after(rollout: Rollout, values: NDArray[Any], prompt: int) -> NDArray[Any]:
    """`values` of the response after one value `prompt` for each prompt token."""
    return np.concatenate((np.full(len(rollout.prompt_ids), prompt, values.dtype), values))


def _rows(flat: NDArray[Any], taken: NDArray[np.bool_], fill: int) -> NDArray[Any]:
    """Rows that hold `flat` where `taken` is True, and `fill` elsewhere."""
    rows = np.full((*taken.shape, *flat.shape[1:]), fill, flat.dtype)
    rows[taken] = flat
    return rows
