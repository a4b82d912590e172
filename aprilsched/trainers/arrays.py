"""Arithmetic that corrections need, on torch tensors and numpy arrays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from aprilsched.errors import ConfigError

if TYPE_CHECKING:
    pass


def namespace(**arrays: object) -> Any:
    """Return the module, numpy or torch, whose functions take these arrays; they have one shape."""
    (first_name, first), *others = arrays.items()
    xp = _module(first_name, first)
    shape = getattr(first, "shape", None)
    for name, array in others:
        if _module(name, array) is not xp:
            raise ConfigError(
                f"{first_name} and {name} are arrays of different kinds; give numpy arrays or "
                "torch tensors only."
            )
        if getattr(array, "shape", None) != shape:
            raise ConfigError(
                f"{first_name} has shape {tuple(shape or ())} and {name} has shape "
                f"{tuple(getattr(array, 'shape', ()))}; give arrays of one shape."
            )
    return xp


def _module(name: str, array: object) -> Any:
    if isinstance(array, np.ndarray):
        return np
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch
    raise ConfigError(f"{name} is a {type(array).__name__}; give a numpy array or a torch tensor.")


def _torch(array: Any) -> Any:
    """torch if `array` is a tensor; None if it is numpy's."""
    return None if isinstance(array, np.ndarray) else sys.modules["torch"]


def wide(array: Any) -> Any:
    """`array` in its own dtype, or in float32 if that is narrower or not a floating dtype."""
    torch = _torch(array)
    if torch is None:
        return array.astype(np.result_type(array.dtype, np.float32), copy=False)
    return array.to(torch.promote_types(array.dtype, torch.float32))


def like(array: Any, other: Any) -> Any:
    """`array` in the dtype of `other`."""
    return array.astype(other.dtype) if _torch(array) is None else array.to(other.dtype)


def masked_difference(minuend: Any, subtrahend: Any, counted: Any) -> Any:
    """Return the difference at the tokens that count, and 0 at the others.

    Both sides are 0 there before anything is computed: the gradient of exp at a padded -inf would
    be NaN, and NaN times 0 is not 0.
    """
    xp = namespace(minuend=minuend, subtrahend=subtrahend)
    return xp.where(counted, wide(minuend), 0.0) - xp.where(counted, wide(subtrahend), 0.0)


def detached(array: Any) -> Any:
    return array if _torch(array) is None else array.detach()


def advantages_like(advantages: Any, logprobs: Any) -> Any:
    """Constant, and of the shape of `logprobs`."""
    xp = _module("logprobs", logprobs)
    if _module("advantages", advantages) is not xp:
        raise ConfigError(
            "logprobs and advantages are arrays of different kinds; give numpy arrays or torch "
            "tensors only."
        )
    rows = (*logprobs.shape[:-1], 1)
    # [B] is refused, because it would be spread over the wrong dimension where B equals S.
    if advantages.shape != logprobs.shape and (
        logprobs.ndim < 2 or tuple(advantages.shape) != rows
    ):
        raise ConfigError(
            f"advantages have shape {tuple(advantages.shape)} and logprobs "
            f"{tuple(logprobs.shape)}; give one advantage for each token, or [B, 1]."
        )
    return xp.broadcast_to(wide(detached(advantages)), tuple(logprobs.shape))


def per_sequence(values: Any, counted: Any, *, mean: bool, cu_seqlens: Any) -> Any:
    """Sum or mean of each sequence at every token of it; `values` are 0 where no token counts."""
    xp = namespace(values=values, counted=counted)
    ones = like(counted, values)
    if cu_seqlens is None:
        if values.ndim != 2:
            raise ConfigError(
                f"logprobs have {values.ndim} dimensions; give padded rows [B, S], or packed "
                "tokens [N] with cu_seqlens."
            )
        total = xp.sum(values, -1)[:, None]
        number = xp.sum(ones, -1)[:, None]
        per_token = total / xp.clip(number, 1, None) if mean else total
        return xp.broadcast_to(per_token, tuple(values.shape))
    if values.ndim != 1:
        raise ConfigError("cu_seqlens is for packed tokens [N]; leave it out for padded rows.")
    _module("cu_seqlens", cu_seqlens)
    owner = owners(cu_seqlens)
    if owner.shape != values.shape:
        raise ConfigError(
            f"cu_seqlens ends at {owner.shape[0]} and there are {values.shape[0]} tokens; give the "
            "bounds of these sequences."
        )
    sequences = cu_seqlens.shape[0] - 1
    total = sums(values, owner, sequences)
    if mean:
        total = total / xp.clip(sums(ones, owner, sequences), 1, None)
    return total[owner]


def owners(cu_seqlens: Any) -> Any:
    """Return the index of the sequence that each packed token belongs to."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    torch = _torch(cu_seqlens)
    if torch is None:
        return np.arange(len(lengths)).repeat(lengths)
    return torch.arange(len(lengths), device=cu_seqlens.device).repeat_interleave(lengths)


def sums(values: Any, owner: Any, sequences: int) -> Any:
    """Return the sum of the values of each sequence."""
    if _torch(values) is None:
        return np.bincount(owner, weights=values, minlength=sequences).astype(values.dtype)
    return values.new_zeros(sequences).index_add(0, owner, values)
