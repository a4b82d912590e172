"""From slices, as cuts bring them, to all tokens of a rollout.

Invariant: what comes out has no gap. Where a slice is missing (its page is damaged), the tokens
end before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from aprilsched.core.saving.saved import SavedRun, SavedTokens, TokenPage
from aprilsched.types import Float32Array, Int32Array

__all__ = ["Slice", "assemble", "slices_of"]


class Slice(NamedTuple):
    """A run of tokens of one rollout, from `start` on."""

    start: int
    token_ids: Int32Array
    logprobs: Float32Array
    version: int
    engine: str | None


def slices_of(page: TokenPage) -> Iterable[tuple[int, Slice]]:
    """Each slice of a page with the rollout it belongs to; views of the page."""
    at = 0
    rows: list[list[int]] = page.slices.tolist()
    for rollout_id, start, length, version, place in rows:
        end = at + length
        engine = None if place < 0 else page.engines[place]
        yield (
            rollout_id,
            Slice(start, page.token_ids[at:end], page.logprobs[at:end], version, engine),
        )
        at = end


def assemble(slices: Iterable[Slice]) -> SavedTokens:
    """The tokens that the slices make up, copied."""
    ids: list[Int32Array] = []
    logprobs: list[Float32Array] = []
    runs: list[SavedRun] = []
    end = 0
    for piece in sorted(slices, key=lambda piece: piece.start):
        if piece.start != end:
            break
        end += len(piece.token_ids)
        ids.append(piece.token_ids)
        logprobs.append(piece.logprobs)
        if runs and runs[-1][1:] == (piece.version, piece.engine):
            runs[-1] = (end, piece.version, piece.engine)
        else:
            runs.append((end, piece.version, piece.engine))
    if not ids:
        return SavedTokens()
    return SavedTokens(
        token_ids=np.concatenate(ids), logprobs=np.concatenate(logprobs), runs=tuple(runs)
    )
