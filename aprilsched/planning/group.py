"""A group in a trial: the lengths that its members will have, and what they have so far."""

from __future__ import annotations

__all__ = ["CompleteGroups", "TrialGroup"]


class TrialGroup:
    """`have` counts tokens at the last stop, or the whole length of a finished member."""

    __slots__ = ("_sampled", "finished", "first_run", "have", "lengths", "opened", "unfinished")

    def __init__(self, lengths: list[int], opened: int) -> None:
        self.lengths = lengths
        self.have = [0] * len(lengths)
        self.finished = [False] * len(lengths)
        self.unfinished = len(lengths)
        self.opened = opened
        """The batch in which it was opened."""
        self.first_run: int | None = None
        self._sampled: dict[int, int] = {}
        """Tokens by the batch in which they were sampled."""

    @property
    def members(self) -> list[int]:
        return self.lengths

    @property
    def tokens(self) -> int:
        """Once it is complete."""
        return sum(self.lengths)

    def note(self, member: int, tokens: int, batch: int) -> None:
        """The member has so many tokens at the stop of `batch`."""
        new = tokens - self.have[member]
        self._sampled[batch] = self._sampled.get(batch, 0) + new
        self.have[member] = tokens

    def finish(self, member: int, batch: int) -> None:
        """The member has ended in `batch`."""
        self.note(member, self.lengths[member], batch)
        self.finished[member] = True
        self.unfinished -= 1

    def older_than(self, batch: int, versions: int) -> int:
        """Its tokens that are more than so many versions old when `batch` is delivered."""
        return sum(n for sampled, n in self._sampled.items() if batch - sampled > versions)


class CompleteGroups:
    """Those that wait for their batch, in the order of their completion."""

    def __init__(self) -> None:
        self.groups: list[TrialGroup] = []
        self.samples = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, group: TrialGroup) -> None:
        self.groups.append(group)
        self.samples += len(group.lengths)
        self.tokens += group.tokens

    def take(self, count: int) -> list[TrialGroup]:
        """The first ones leave."""
        taken, self.groups = self.groups[:count], self.groups[count:]
        for group in taken:
            self.samples -= len(group.lengths)
            self.tokens -= group.tokens
        return taken
