"""The protocol of a store, and functions that join its slices to the tokens of a rollout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from aprilsched.core.state.saved import Saved, SavedRun, SavedTokens, Snapshot, TokenPage
from aprilsched.types import Float32Array, Int32Array


class Store(Protocol):
    """Keeps snapshots of the scheduler, which calls one method at a time, from any thread.

    Every method raises only :class:`~aprilsched.errors.StoreError`. If saving a snapshot fails,
    the store stays as it was, and the next snapshot is a full one.
    """

    @property
    def inline(self) -> bool:
        """Whether the calls run on the event loop and not in a thread: they are short enough, or
        the loop has a virtual clock."""
        ...

    def open(self) -> Saved | None:
        """Open the store and return what was saved before; None in a new store."""
        ...

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        """Save a snapshot, completely or not at all.

        With `durable` it survives a loss of power; otherwise it survives any end of the process.
        """
        ...

    def close(self) -> None: ...


class Slice(NamedTuple):
    """Consecutive tokens of one rollout from position `start` on, of one version and engine."""

    start: int
    token_ids: Int32Array
    logprobs: Float32Array
    version: int
    engine: str | None


def slices_of(page: TokenPage) -> Iterable[tuple[int, Slice]]:
    """Yield each slice of a page with the rollout to which it belongs; slices are views."""
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
    """Join slices to one rollout's tokens, up to the first gap; the result is a copy."""
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
