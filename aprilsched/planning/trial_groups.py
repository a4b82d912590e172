"""The groups of a trial: the progress of their members, and the complete ones that wait.

With single samples, a member that may be delivered is a group of its own from then on, as in
:mod:`aprilsched.kernel.core.steps.samples`.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class TrialGroup:
    """A group, or a single sample that has left it.

    `have` counts each member's tokens at the last stop, or at its end.

    Attributes:
        lengths: the number of tokens of each member at its end.
        later: the lengths if the group restarts.
        opened: index of the batch in which the group was opened.
        row: the row of its lengths in the setting.
        level: mean and variance of its log level, by what is remembered of it; None for nothing.
        siblings: number of others that end before a member is delivered; None for whole groups.
        place: index of this single sample in its group; 0 for a group.
        gaps: number of gaps of each member; None where there are none.
        first_run: index of the first batch in which a deferred group ran; None before.
        chosen: the batch for which members were chosen last, where groups are deferred, and how
            many.
        complete_at: time at which the last member ended, in seconds.
    """

    lengths: list[int]
    later: list[int]
    opened: int
    row: int
    level: tuple[float, float] | None = None
    siblings: int | None = None
    place: int = 0
    gaps: list[int] | None = None
    first_run: int | None = None
    chosen: tuple[int, int] = (-1, 0)
    complete_at: float = 0.0
    have: list[int] = field(init=False)
    finished: list[bool] = field(init=False)
    unfinished: int = field(init=False)
    _sampled: list[dict[int, int]] = field(init=False)
    """For each member the number of its tokens by the version that sampled them. The members of a
    whole group share one."""

    def __post_init__(self) -> None:
        self.restart(self.lengths)

    def restart(self, lengths: list[int]) -> None:
        """Discard all tokens; the members now end at `lengths`."""
        self.lengths = lengths
        self.have = [0] * len(lengths)
        self.finished = [False] * len(lengths)
        self.unfinished = len(lengths)
        if self.siblings is None:
            self._sampled = [{}] * len(lengths)
        else:
            self._sampled = [{} for _ in lengths]

    @property
    def members(self) -> list[int]:
        return self.lengths

    @property
    def tokens(self) -> int:
        """Number of tokens of the complete group."""
        return sum(self.lengths)

    @property
    def sampled(self) -> dict[int, int]:
        """Number of tokens of a unit by the version that sampled them."""
        return self._sampled[0]

    def goal(self, member: int) -> int:
        """Return the number of tokens of the member at its next gap, or at its end."""
        length, have = self.lengths[member], self.have[member]
        turns = 1 if self.gaps is None else self.gaps[member] + 1
        turn = have * turns // length + 1
        turn += turn * length // turns <= have
        return min(length, max(turn * length // turns, have + 1))

    def runs(self, member: int, batch: int) -> bool:
        """Return whether the member was chosen for this batch, where groups are deferred."""
        return self.chosen[0] == batch and member < self.chosen[1]

    def note(self, member: int, tokens: int, batch: int) -> None:
        """Record that the member has `tokens` tokens at the stop of `batch`."""
        new = tokens - self.have[member]
        if new:
            # A response that was preempted before its first token is of no version.
            sampled = self._sampled[member]
            sampled[batch] = sampled.get(batch, 0) + new
        self.have[member] = tokens

    def finish(self, member: int, batch: int) -> list[TrialGroup]:
        """Record that the member ended in `batch`, and return what may be delivered now.

        That is the complete group; or, of single samples, each that has ended together with its
        siblings: all so far at the end that gives them enough, and the member itself later.
        """
        self.note(member, self.lengths[member], batch)
        self.finished[member] = True
        self.unfinished -= 1
        if self.siblings is None:
            return [] if self.unfinished else [self]
        ended = len(self.lengths) - self.unfinished
        least = min(self.siblings + 1, len(self.lengths))
        if ended > least:
            return [self._sample(member)]
        return [self._sample(m) for m, f in enumerate(self.finished) if f and ended == least]

    def _sample(self, member: int) -> TrialGroup:
        length = [self.lengths[member]]
        sample = TrialGroup(length, length, self.opened, self.row, place=member)
        sample._sampled = [self._sampled[member]]
        return sample


class CompleteGroups:
    """Groups that wait for their batch, in the order of their completion."""

    def __init__(self) -> None:
        self.groups: list[TrialGroup] = []
        self.samples = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, group: TrialGroup) -> None:
        insort(self.groups, group, key=lambda each: each.complete_at)
        self.samples += len(group.lengths)
        self.tokens += group.tokens

    def remove(self, group: TrialGroup) -> None:
        self.groups.remove(group)
        self.samples -= len(group.lengths)
        self.tokens -= group.tokens
