"""The protocol of a store, and a store in memory, whose contents outlive the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from aprilsched.core.lengths.observed import MOST_KEYS, GroupLengths, Remembered
from aprilsched.core.state.ledger import Entry
from aprilsched.core.state.saved import (
    GroupState,
    RolloutState,
    Saved,
    SavedBatch,
    SavedGroup,
    SavedRun,
    SavedTokens,
    Snapshot,
    TokenPage,
)
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
    for rollout_id, start, length, version, place, _ in rows:
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


# --- memory --------------------------------------------------------------------------------------

# A store in memory: its contents outlive the scheduler, but not the process.

KEPT_ENTRIES = 10_000
"""Number of ledger entries that are kept, as many as the scheduler itself keeps."""
KEPT_LENGTHS = 4096
"""Number of groups whose lengths are kept; the scheduler uses as many responses."""


class MemoryStore:
    """Keeps everything until the process ends.

    It is meant for tests, and for a trainer that opens a new scheduler after an error.
    """

    inline = True

    def __init__(self) -> None:
        self._latest: Snapshot | None = None
        self._clear()

    def _clear(self) -> None:
        self._groups: dict[int, SavedGroup] = {}
        self._group_states: dict[int, GroupState] = {}
        self._rollouts: dict[int, RolloutState] = {}
        self._slices: dict[int, list[Slice]] = {}
        self._batches: dict[int, SavedBatch] = {}
        self._dropped: deque[Entry] = deque(maxlen=KEPT_ENTRIES)
        self._lengths: deque[GroupLengths] = deque(maxlen=KEPT_LENGTHS)
        self._remembered: dict[str | int, Remembered] = {}

    def open(self) -> Saved | None:
        """Return what was saved before; None if nothing was."""
        if self._latest is None:
            return None
        return Saved(
            run=self._latest.run,
            schedule=self._latest.schedule,
            groups=tuple(group for _, group in sorted(self._groups.items())),
            group_states=dict(self._group_states),
            rollouts=dict(self._rollouts),
            tokens={rollout: assemble(slices) for rollout, slices in self._slices.items()},
            batches=tuple(batch for _, batch in sorted(self._batches.items())),
            dropped=tuple(self._dropped),
            lengths=tuple(self._lengths),
            damaged={},
            remembered=tuple(self._remembered.values()),
        )

    def save(self, snapshot: Snapshot, *, durable: bool) -> None:
        """Save a snapshot; `durable` makes no difference."""
        if snapshot.full:
            self._clear()
        self._latest = snapshot
        self._groups.update((group.group_id, group) for group in snapshot.groups)
        self._group_states.update((state.group_id, state) for state in snapshot.group_states)
        for state in snapshot.rollouts:
            self._rollouts[state.rollout_id] = state
            if state.rewritten:
                self._slices.pop(state.rollout_id, None)
        if snapshot.page is not None:
            for rollout_id, piece in slices_of(snapshot.page):
                self._slices.setdefault(rollout_id, []).append(piece)
        self._dropped.extend(snapshot.dropped)
        self._lengths.extend(snapshot.lengths)
        for record in snapshot.remembered:
            self._remembered.pop(record.key, None)
            self._remembered[record.key] = record
        while len(self._remembered) > MOST_KEYS:
            del self._remembered[next(iter(self._remembered))]
        for index in snapshot.acknowledged:
            self._batches.pop(index, None)
        self._batches.update((batch.index, batch) for batch in snapshot.batches)
        for group_id in snapshot.removed:
            self._remove(group_id)

    def close(self) -> None:
        """Do nothing: the store can be opened again."""

    def _remove(self, group_id: int) -> None:
        self._group_states.pop(group_id, None)
        group = self._groups.pop(group_id, None)
        for member in () if group is None else group.members:
            self._rollouts.pop(member.rollout_id, None)
            self._slices.pop(member.rollout_id, None)
