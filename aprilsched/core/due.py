"""The groups that the rule "finish" wants in the next batch, known without a look at all of them.

Invariant: `_candidates` has every open training group that is due, and maybe some that are not
or are no longer open; each is asked again when it counts. Groups come due when the trainer's
version changes (all are looked at then), or with tokens of an old version (:meth:`note`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aprilsched.core.records import GroupRecord

if TYPE_CHECKING:
    from aprilsched.core.state import SchedulerState

__all__ = ["DueGroups", "is_due"]


class DueGroups:
    """Nothing is done while another rule is in force."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._candidates: dict[int, GroupRecord] = {}

    def note(self, state: SchedulerState, group: GroupRecord) -> None:
        """The group has other tokens, or other versions of them, than before."""
        if state.rules.staleness.rule == "finish" and is_due(state, group):
            self._candidates[group.group_id] = group

    def open(self, state: SchedulerState) -> Iterator[GroupRecord]:
        """Those that are due and neither delivered nor dropped."""
        if state.rules.staleness.rule != "finish":
            return
        version = state.tracker.trainer
        if self._version != version:
            self._version = version
            self._candidates = {
                group.group_id: group
                for group in state.book.training_groups()
                if is_due(state, group)
            }
        for group_id, group in list(self._candidates.items()):
            if group_id not in state.book.groups:
                del self._candidates[group_id]
            elif is_due(state, group):
                yield group


def is_due(state: SchedulerState, group: GroupRecord) -> bool:
    """Must the group be in the batch that the trainer's version consumes?"""
    gate = state.rules.staleness
    return (
        gate.rule == "finish"
        and group.evaluation_id is None
        and gate.due(group.oldest_version, state.tracker.trainer)
    )
