"""What a scheduler asks of a store, and how its slices become all tokens of a rollout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from aprilsched.core.state.saved import Cut, Saved, SavedRun, SavedTokens, TokenPage
from aprilsched.types import Float32Array, Int32Array

__all__ = ["Slice", "Store", "assemble", "slices_of"]


class Store(Protocol):
    """Keeps cuts. The scheduler calls one method at a time, perhaps from different threads.

    Errors: :class:`~aprilsched.errors.StoreError`, nothing else. A cut that failed to be saved has
    left the store as it was; the next one is then a whole one.
    """

    @property
    def inline(self) -> bool:
        """Its calls are so short that they need no thread of their own, or it must not have one
        (on a virtual clock)."""
        ...

    def open(self) -> Saved | None:
        """What was saved before; None in a new store."""
        ...

    def save(self, cut: Cut, *, durable: bool) -> None:
        """Keep a cut, whole or not at all. With `durable` it survives a loss of power, otherwise
        the end of the process, however it ends."""
        ...

    def close(self) -> None: ...


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
