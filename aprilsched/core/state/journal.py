"""What changed since the last cut, noted where it changes.

Looking at every rollout in flight for each cut would cost more than the cut itself. Rollouts of
evaluations are never noted: an evaluation ends with the call that asked for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aprilsched.core.lengths.groups import GroupLengths
from aprilsched.core.state.ledger import Entry
from aprilsched.core.state.page import PageBuilder
from aprilsched.core.state.records import GroupRecord, RolloutRecord
from aprilsched.types import Batch, Float32Array, Int32Array

__all__ = ["DeliveredBatch", "Journal", "Offered"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeliveredBatch:
    """A batch with the trainer, or offered to it, which it has not acknowledged; its groups keep
    their members."""

    index: int
    version: int
    oldest_unmasked: int | None
    groups: tuple[GroupRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Offered:
    """The batch that the trainer may take; without a `record` it is one of those that are
    delivered again. `target_groups` and `peak_tokens` are what was in force before it."""

    batch: Batch
    record: DeliveredBatch | None = None
    target_groups: int = 0
    peak_tokens: int = 0

    @property
    def groups(self) -> tuple[GroupRecord, ...]:
        """What of it is in flight."""
        return () if self.record is None else self.record.groups


class Journal:
    """Notes while `active`; nothing is noted where nothing is saved."""

    def __init__(self, room: int = 0) -> None:
        self.active = False
        self.launched: dict[int, GroupRecord] = {}
        self.arrived = PageBuilder(room)
        """Tokens, as they came."""
        self.changed: dict[int, RolloutRecord] = {}
        """Rollouts of which something other than their tokens changed."""
        self.changed_groups: dict[int, GroupRecord] = {}
        self.delivered: dict[int, DeliveredBatch] = {}
        """Batches that were offered: the trainer may have them when the cut is read."""
        self.acknowledged: list[int] = []
        self.removed: dict[int, int] = {}
        """Groups that left, with all their tokens."""
        self.gone: set[int] = set()
        """Their rollouts."""
        self.dropped: list[Entry] = []
        self.lengths: list[GroupLengths] = []
        self.finished = False
        """Something came to its end, so the cut should not wait long."""

    def clear(self) -> None:
        """A cut was taken."""
        # The next page will be about as large, and the last one is the cut's now.
        active, room = self.active, len(self.arrived)
        self.__init__(room)
        self.active = active

    def launch(self, group: GroupRecord) -> None:
        if self.active and _counts(group):
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
        """Tokens that were just booked."""
        if self.active and len(ids) and _counts(rollout.group):
            start = len(rollout.log) - len(ids)
            self.arrived.add(rollout.rollout_id, start, ids, logprobs, version, engine)

    def change(self, rollout: RolloutRecord) -> None:
        if self.active and _counts(rollout.group):
            self.changed[rollout.rollout_id] = rollout

    def finish(self, rollout: RolloutRecord) -> None:
        if self.active and _counts(rollout.group):
            self.changed[rollout.rollout_id] = rollout
            self.finished = True

    def change_group(self, group: GroupRecord) -> None:
        if self.active and _counts(group):
            self.changed_groups[group.group_id] = group

    def drop(self, group: GroupRecord, entries: Iterable[Entry]) -> None:
        """The group went to the ledger; that of an evaluation has entries as well."""
        if not self.active:
            return
        self.dropped.extend(entries)
        self._forget(group.group_id, group.members)

    def refuse(self, entry: Entry) -> None:
        """A prompt was refused: there never was a group of it."""
        if self.active:
            self.dropped.append(entry)

    def drop_saved(self, entry: Entry) -> None:
        """A rollout that was saved, and that a restart leaves behind."""
        if self.active:
            self.dropped.append(entry)
            self.removed[entry.group_id] = self.removed.get(entry.group_id, 0) + entry.tokens

    def deliver(self, batch: DeliveredBatch) -> None:
        if self.active:
            self.delivered[batch.index] = batch

    def withdraw(self, batch: DeliveredBatch) -> None:
        """It was offered and not taken. Another one may get its number."""
        if self.active:
            self.delivered.pop(batch.index, None)
            self.acknowledged.append(batch.index)

    def acknowledge(self, batch: DeliveredBatch) -> None:
        if not self.active:
            return
        self.withdraw(batch)
        for group in batch.groups:
            self._forget(group.group_id, group.members)

    def note_lengths(self, group: GroupLengths) -> None:
        if self.active:
            self.lengths.append(group)

    def _forget(self, group_id: int, members: Iterable[RolloutRecord]) -> None:
        tokens = 0
        for member in members:
            self.gone.add(member.rollout_id)
            self.changed.pop(member.rollout_id, None)
            tokens += len(member.log)
        self.removed[group_id] = tokens
        self.launched.pop(group_id, None)
        self.changed_groups.pop(group_id, None)


def _counts(group: GroupRecord) -> bool:
    # What comes back for a dropped group is of nobody any more.
    return group.evaluation_id is None and group.dropped is None
