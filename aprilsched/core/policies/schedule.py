"""What automatic over-provisioning chooses: the policies that may change during a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from aprilsched.core.policies.length_buckets import LengthBuckets
from aprilsched.core.policies.over_provision import FixedRatio, OverProvision
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.wave import Wave

__all__ = ["Pace", "Schedule", "first_schedule"]

Pace: TypeAlias = Literal["synchronous", "asynchronous"]

FIRST_RATIO = 1.5
"""Near the flat part of every optimum that was measured, and never very stale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How much is started and when, with what this is expected to do (None if it is not known).

    Attributes:
        over_provision: how many groups are kept open.
        refill: when new groups are started.
        pace: whether generation goes on while the trainer trains; None for the configured pace.
        efficiency: expected efficiency, T_bound / T.
        off_policy_share: expected share of delivered tokens that are of an older version.
        why: the reason of the choice, as one sentence.
    """

    over_provision: OverProvision
    refill: Refill
    pace: Pace | None = None
    efficiency: float | None = None
    off_policy_share: float | None = None
    why: str = ""

    def same_as(self, other: Schedule) -> bool:
        """Whether both have the same policies, whatever is expected of them."""
        return (
            self.over_provision == other.over_provision
            and self.refill == other.refill
            and self.pace == other.pace
        )


def first_schedule(*, may_defer: bool) -> Schedule:
    """The schedule that is used until some lengths are known.

    Args:
        may_defer: length buckets are possible. Their many open groups take several batches to
            open, so this begins at once.
    """
    return Schedule(
        over_provision=FixedRatio(ratio=FIRST_RATIO),
        refill=LengthBuckets() if may_defer else Wave(),
        why="nothing is known of the lengths yet: half a batch more than needed",
    )
