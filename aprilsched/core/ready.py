"""The complete training groups, in the order of their completion, and how much they hold.

Invariant: `samples` and `tokens` are those of the groups in it. A complete group does not grow,
so they are counted when it comes and when it goes, and not after every event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from aprilsched.core.records import GroupRecord

__all__ = ["Ready"]


class Ready(Sequence[GroupRecord]):
    """Groups that wait for their batch."""

    def __init__(self) -> None:
        self._groups: list[GroupRecord] = []
        self.samples = 0
        """Their rollouts."""
        self.tokens = 0

    def add(self, group: GroupRecord) -> None:
        self._groups.append(group)
        self.samples += len(group.members)
        self.tokens += group.tokens

    def put_back(self, groups: Sequence[GroupRecord]) -> None:
        """These had been taken out for a batch that the trainer did not take: they go first."""
        self._groups[:0] = groups
        self.samples += sum(len(group.members) for group in groups)
        self.tokens += sum(group.tokens for group in groups)

    def remove(self, group: GroupRecord) -> None:
        self._groups.remove(group)
        self.samples -= len(group.members)
        self.tokens -= group.tokens

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[GroupRecord]:
        return iter(self._groups)

    @overload
    def __getitem__(self, index: int) -> GroupRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[GroupRecord]: ...
    def __getitem__(self, index: int | slice) -> GroupRecord | list[GroupRecord]:
        return self._groups[index]
