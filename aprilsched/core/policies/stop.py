"""When a batch is full: enough whole groups, counted as groups, as samples or as tokens.

Everything else thinks in groups: gates, refill rules and ratios. How many of them a batch takes,
and how many the complete ones stand for, is said here and nowhere else, from the *usual* group:
what one is expected to count in the unit of the rule. It is exact for groups and samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

__all__ = ["GroupSize", "Held", "StopAt", "StopUnit"]

StopUnit: TypeAlias = Literal["groups", "samples", "tokens"]


class GroupSize(Protocol):
    """What the rule looks at in a complete group."""

    @property
    def members(self) -> Sequence[object]: ...
    @property
    def tokens(self) -> int: ...


class Held(Protocol):
    """What the rule looks at in all complete groups."""

    samples: int
    tokens: int

    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StopAt:
    """A batch is full when its groups hold at least `amount` of `unit`."""

    unit: StopUnit
    amount: int

    def enough(self, held: Held, *, batches: int = 1) -> bool:
        """Are there so many batches in all of `held`?"""
        return self._held(held) >= batches * self.amount

    def batch_groups(self, usual: float) -> int:
        """Groups that a batch takes if each counts `usual`."""
        # Guards against rounding up what is whole but for the last place.
        return max(1, math.ceil(self.amount / usual - 1e-9))

    def as_groups(self, held: Held, usual: float) -> int:
        """For how many usual groups `held` stands: fewer than a batch takes, if it is not enough
        for one."""
        return math.floor(self._held(held) / usual + 1e-9)

    def take(self, groups: Sequence[GroupSize]) -> int | None:
        """How many of `groups`, from the front, make a batch; None if all are not enough."""
        held = 0
        for count, group in enumerate(groups, 1):
            held += self._measure(group)
            if held >= self.amount:
                return count
        return None

    def _held(self, held: Held) -> int:
        if self.unit == "groups":
            return len(held)
        return held.samples if self.unit == "samples" else held.tokens

    def _measure(self, group: GroupSize) -> int:
        if self.unit == "groups":
            return 1
        return len(group.members) if self.unit == "samples" else group.tokens
