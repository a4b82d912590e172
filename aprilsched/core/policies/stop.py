"""When a batch is full: enough whole groups, counted as groups, as samples or as tokens."""

from __future__ import annotations

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

    def enough(self, held: Held) -> bool:
        """Is there a batch in all of `held`?"""
        match self.unit:
            case "groups":
                return len(held) >= self.amount
            case "samples":
                return held.samples >= self.amount
            case "tokens":
                return held.tokens >= self.amount

    def take(self, groups: Sequence[GroupSize]) -> int | None:
        """How many of `groups`, from the front, make a batch; None if all are not enough."""
        held = 0
        for count, group in enumerate(groups, 1):
            held += self._measure(group)
            if held >= self.amount:
                return count
        return None

    def _measure(self, group: GroupSize) -> int:
        if self.unit == "groups":
            return 1
        return len(group.members) if self.unit == "samples" else group.tokens
