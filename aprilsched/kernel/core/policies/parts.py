"""Chooses the next part of a batch for the trainer.

A batch reaches the trainer in parts; a whole batch has one. A part consists of units. A unit is
currently a group with all its rollouts, but nothing here depends on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

U = TypeVar("U")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Generic[U]):
    """The units that the trainer takes at once."""

    units: tuple[U, ...]
    last: bool
    """Whether this part completes the batch. A last part may be empty, if the units that the batch
    waited for were dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Supply(Generic[U]):
    """The units that can complete a batch, and what it still lacks."""

    units: Sequence[U]
    """The available units, in the order in which the batch takes them."""
    measure: Callable[[U], int]
    """Returns the amount that a unit counts towards the batch."""
    lacking: int
    """Amount that the batch still lacks."""
    due: int = 0
    """Number of units, the first ones of `units`, that the batch must contain."""
    awaited: int = 0
    """Number of further units that the batch must contain and that are not available yet."""
    exact: bool = False
    """Whether the batch takes exactly `lacking`; otherwise at least that. Each unit counts 1."""
    ends: bool = False
    """Whether no other units follow, so that all of `units` are the rest of the batch."""

    def outstanding(self, chosen: int) -> int:
        """Return the number of required units besides the first `chosen` ones."""
        return max(0, self.due - chosen) + self.awaited

    def accepts(self, chosen: int, lacking: int) -> bool:
        """Return whether the batch takes another unit after `chosen` ones, if it lacks `lacking`.

        An exact batch reserves places for outstanding units, so another unit may find none.
        """
        if chosen < self.due:
            return lacking > 0 or not self.exact
        return lacking > (self.outstanding(chosen) if self.exact else 0)

    def completes(self, chosen: int, lacking: int) -> bool:
        """Return whether the batch is complete after the first `chosen` units."""
        if self.ends and chosen == len(self.units):
            return True
        return lacking <= 0 and (self.exact or not self.outstanding(chosen))


def next_part(supply: Supply[U], *, whole: bool) -> Part[U] | None:
    """Return the part that the trainer may take next, or None if it has to wait.

    Args:
        supply: the units that can complete the batch.
        whole: the trainer takes the rest in one part; otherwise one unit at a time.
    """
    chosen, lacking = 0, supply.lacking
    for unit in supply.units if whole else supply.units[:1]:
        if not supply.accepts(chosen, lacking):
            break
        chosen += 1
        lacking -= supply.measure(unit)
    last = supply.completes(chosen, lacking)
    if not last and (whole or not chosen):
        return None
    return Part(units=tuple(supply.units[:chosen]), last=last)
