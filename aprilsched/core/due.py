"""The groups that the rule "finish" wants in the next batch, known without a look at all of them.

Invariant: `_candidates` has every open training group that is due, and maybe some that are not
or are no longer open; each is asked again when it counts. Groups come due when the trainer's
version changes (all are looked at then), or with tokens of an old version (:meth:`note`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from aprilsched.core.policies.staleness import StalenessGate
from aprilsched.core.records import GroupRecord

__all__ = ["DueGroups"]


class DueGroups:
    """Nothing is done while `gate` has another rule."""

    def __init__(self, gate: StalenessGate) -> None:
        self._gate = gate
        self._version: int | None = None
        self._candidates: dict[int, GroupRecord] = {}

    def has(self, group: GroupRecord, version: int) -> bool:
        """Must the group be in the batch that `version` consumes?"""
        if self._gate.rule != "finish" or group.evaluation_id is not None:
            return False
        return self._gate.due(group.oldest_version, version)

    def note(self, group: GroupRecord, version: int) -> None:
        """The group has other tokens, or other versions of them, than before."""
        if self.has(group, version):
            self._candidates[group.group_id] = group

    def open(self, groups: Mapping[int, GroupRecord], version: int) -> Iterator[GroupRecord]:
        """Those of `groups`, neither delivered nor dropped, that are due."""
        if self._gate.rule != "finish":
            return
        if self._version != version:
            self._version = version
            self._candidates = {g.group_id: g for g in groups.values() if self.has(g, version)}
        for group_id, group in list(self._candidates.items()):
            if group_id not in groups:
                del self._candidates[group_id]
            elif self.has(group, version):
                yield group
