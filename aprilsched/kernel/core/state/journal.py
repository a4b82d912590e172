"""The changes since the last snapshot, for the store. They are recorded where they happen.

A scan of every rollout in flight for each snapshot would cost more than the snapshot itself.
Rollouts of evaluations are never recorded, because an evaluation ends with the call that requested
it. Late tokens of a dropped group are not recorded either, because nothing refers to them.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable

import numpy as np

from aprilsched.kernel.core.lengths.memory import Remembered
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.state.ledger import Entry
from aprilsched.kernel.core.state.records import DeliveredBatch, GroupRecord, RolloutRecord
from aprilsched.kernel.core.state.saved import TokenPage
from aprilsched.kernel.core.state.token_log import grown
from aprilsched.types import Float32Array, Int32Array

_ROOM = 1 << 12
_NO_ENGINE = -1


class PageBuilder:
    """Writes tokens straight into a page as they arrive between two snapshots.

    A list of small arrays, joined at the snapshot, would cost several times as much, because each
    of the thousand arrays is a cache miss by then.
    """

    def __init__(self, room: int = _ROOM) -> None:
        self._ids: Int32Array = np.empty(room, dtype=np.int32)
        self._logprobs: Float32Array = np.empty(room, dtype=np.float32)
        self._size = 0
        self._slices = array("i")
        self._places: dict[str | None, int] = {None: _NO_ENGINE}

    def __len__(self) -> int:
        """Return the number of tokens on the page."""
        return self._size

    def add(
        self,
        rollout: RolloutRecord,
        start: int,
        ids: Int32Array,
        logprobs: Float32Array,
        version: int,
        engine: str | None,
    ) -> None:
        """Add tokens of one rollout, engine and version, from `start` in the response on."""
        low, count = self._size, len(ids)
        end = low + count
        if end > len(self._ids):
            room = max(end, 2 * len(self._ids))
            self._ids = grown(self._ids, room, low)
            self._logprobs = grown(self._logprobs, room, low)
        self._ids[low:end] = ids
        self._logprobs[low:end] = logprobs
        self._size = end
        place = self._places.get(engine)
        if place is None:
            place = self._places[engine] = len(self._places) - 1
        self._slices.extend(
            (rollout.rollout_id, start, count, version, place, rollout.group.group_id)
        )

    def forget(self, rollouts: Collection[int]) -> None:
        """Remove the tokens of these rollouts from the page."""
        if not rollouts or not self._size:
            return
        slices = self._table()
        out = np.isin(slices[:, 0], list(rollouts))
        if not out.any():
            return
        kept = np.flatnonzero(~np.repeat(out, slices[:, 2]))
        for column in (self._ids, self._logprobs):
            column[: len(kept)] = column[kept]
        self._size = len(kept)
        self._slices = array("i", slices[~out].tobytes())

    def page(self) -> TokenPage | None:
        """Return the finished page, which gets no more tokens; None if it has no tokens."""
        if not self._size:
            return None
        return TokenPage(
            slices=self._table(),
            engines=tuple(engine for engine in self._places if engine is not None),
            token_ids=self._ids[: self._size],
            logprobs=self._logprobs[: self._size],
        )

    def _table(self) -> Int32Array:
        return np.array(self._slices, dtype=np.int32).reshape(-1, 6)


class Journal:
    """The changes since the last snapshot, recorded only while `active`: if the run has a store."""

    def __init__(self, room: int = 0) -> None:
        self.active = False
        self.launched: dict[int, GroupRecord] = {}
        """Launched groups."""
        self.arrived = PageBuilder(room)
        """New tokens."""
        self.rows_from: dict[int, tuple[RolloutRecord, dict[str, int]]] = {}
        """Rollouts whose companions have new rows, and the first new row by name."""
        self.changed: dict[int, RolloutRecord] = {}
        """Rollouts with changes other than new tokens."""
        self.changed_groups: dict[int, GroupRecord] = {}
        """Groups with changes other than changes of their members."""
        self.delivered: dict[int, DeliveredBatch] = {}
        """Offered batches. The trainer may have them by the time the snapshot is read."""
        self.acknowledged: list[int] = []
        """Acknowledged or withdrawn batches."""
        self.removed: dict[int, None] = {}
        """Groups that left flight, in that order."""
        self.gone: set[int] = set()
        """Rollouts of these groups."""
        self.dropped: list[Entry] = []
        """New entries of the ledger."""
        self.lengths: list[GroupLengths] = []
        """Lengths of ended groups."""
        self.remembered: dict[str | int, Remembered] = {}
        """Updated memory of prompt lengths, by key."""
        self.finished = False
        """Whether a rollout has finished or has its score, so the snapshot should be soon."""

    def clear(self) -> None:
        """Start over after a snapshot."""
        # The last page belongs to the snapshot now. The next one will be about as large.
        active, room = self.active, len(self.arrived)
        self.__init__(room)
        self.active = active

    def launch(self, group: GroupRecord) -> None:
        if self.active and group.in_training:
            self.launched[group.group_id] = group

    def arrive(
        self,
        rollout: RolloutRecord,
        ids: Int32Array,
        logprobs: Float32Array,
        *,
        version: int,
        engine: str | None,
    ) -> None:
        """Record tokens just appended to the rollout's log."""
        if self.active and len(ids) and rollout.group.in_training:
            start = rollout.log.size - len(ids)
            self.arrived.add(rollout, start, ids, logprobs, version, engine)

    def expect_rows(self, rollout: RolloutRecord) -> None:
        """Record that rows of companions are about to be added to the rollout's log."""
        if self.active and rollout.rollout_id not in self.rows_from and rollout.group.in_training:
            held = {name: each.held for name, each in rollout.log.companions.items()}
            self.rows_from[rollout.rollout_id] = rollout, held

    def change(self, rollout: RolloutRecord) -> None:
        if self.active and rollout.group.in_training:
            self.changed[rollout.rollout_id] = rollout

    def finish(self, rollout: RolloutRecord) -> None:
        if self.active and rollout.group.in_training:
            self.changed[rollout.rollout_id] = rollout
            self.finished = True

    def change_group(self, group: GroupRecord) -> None:
        if self.active and group.in_training:
            self.changed_groups[group.group_id] = group

    def drop(self, group: GroupRecord, entries: Iterable[Entry]) -> None:
        """Record a dropped group, of training or an evaluation, and its ledger entries."""
        if not self.active:
            return
        self.dropped.extend(entries)
        self._forget(group.group_id, group.members)

    def refuse(self, entry: Entry) -> None:
        """Record a refused prompt, which launches no group."""
        if self.active:
            self.dropped.append(entry)

    def drop_saved(self, entry: Entry) -> None:
        """Record a saved rollout that the resumed run does not continue."""
        if self.active:
            self.dropped.append(entry)
            self.removed[entry.group_id] = None

    def deliver(self, batch: DeliveredBatch) -> None:
        if self.active:
            self.delivered[batch.index] = batch

    def withdraw(self, batch: DeliveredBatch) -> None:
        """Record a withdrawn offer. Another batch may get its index."""
        if self.active:
            self.delivered.pop(batch.index, None)
            self.acknowledged.append(batch.index)

    def acknowledge(self, batch: DeliveredBatch) -> None:
        if not self.active:
            return
        self.withdraw(batch)
        for group in batch.groups:
            self._forget(group.group_id, group.members)

    def note_lengths(self, group: GroupLengths, remembered: Remembered | None) -> None:
        """Record the lengths of an ended group, and the updated memory of its prompt."""
        if self.active:
            self.lengths.append(group)
            if remembered is not None:
                # The newest last, because a store keeps the last ones.
                self.remembered.pop(remembered.key, None)
                self.remembered[remembered.key] = remembered

    def _forget(self, group_id: int, members: Iterable[RolloutRecord]) -> None:
        for member in members:
            self.gone.add(member.rollout_id)
            self.changed.pop(member.rollout_id, None)
            self.rows_from.pop(member.rollout_id, None)
        self.removed[group_id] = None
        self.launched.pop(group_id, None)
        self.changed_groups.pop(group_id, None)
