"""Companions that simulated requests return: rows that can be checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from aprilsched.kernel.values.companions import TOP, Rows
from aprilsched.simulation.engine.sequence import Sequence
from aprilsched.simulation.engine.toy_model import toy_masks, toy_rows, toy_top
from aprilsched.types import Answer, Float32Array, Int32Array


def token_rows(
    sequence: Sequence, ids: Int32Array, logprobs: Float32Array
) -> dict[str, Rows] | None:
    """Return the rows of new tokens for each companion of tokens; None where none is asked for."""
    if not sequence.request.companions:
        return None
    wanted = [each for each, _ in sequence.request.companions if each.per == "token"]
    return {
        each.name: toy_top(each, ids, logprobs) if each.name == TOP else toy_masks(each, ids)
        for each in wanted
    } or None


def context_rows(sequence: Sequence) -> dict[str, Rows] | None:
    """Return the rows of forwarded tokens, from the first missing position on.

    None if no companion of the context is requested. As in SGLang, a row comes from the latest pass
    over its position.
    """
    if not sequence.request.companions:
        return None
    ends = np.array([end for end, _ in sequence.passes], dtype=np.int64)
    keys = np.array([key for _, key in sequence.passes], dtype=np.uint64)
    known = min(int(ends[-1]) if len(ends) else 0, sequence.prompt + sequence.sent - 1)
    found: dict[str, Rows] = {}
    for companion, start in sequence.request.companions:
        if companion.per == "context" and known > start:
            positions = np.arange(start, known)
            passed = keys[np.searchsorted(ends, positions, side="right")]
            found[companion.name] = toy_rows(companion, positions, passed)
    return found or None


def answer(sequence: Sequence, dp_rank: int | None) -> Answer | None:
    """Return what the request keeps (`keep`): prompt token count, request fields and rank; or None
    if it keeps nothing."""
    sampling = sequence.request.sampling
    if not sampling.keep:
        return None
    entries: dict[str, Any] = {"prompt_tokens": sequence.prompt, "request": sampling.request}
    if dp_rank is not None:
        entries["dp_rank"] = dp_rank
    return Answer.of(entries, sampling.keep)
