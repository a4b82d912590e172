"""What automatic over-provisioning chooses: the part of the rules that may change during a run."""

from __future__ import annotations

from dataclasses import dataclass

from aprilsched.core.policies.length_buckets import LengthBuckets
from aprilsched.core.policies.over_provision import FixedRatio, OverProvision
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.wave import Wave

__all__ = ["Schedule", "first_schedule"]

FIRST_RATIO = 1.5
"""Near every optimum's flat part, and never very stale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A schedule and what it is expected to do (None where nothing is known yet).

    Attributes:
        over_provision: how many groups are kept open.
        refill: when new ones are started.
        efficiency: expected T_bound / T.
        off_policy_share: expected share of delivered tokens of an older version.
        why: one sentence for people.
    """

    over_provision: OverProvision
    refill: Refill
    efficiency: float | None = None
    off_policy_share: float | None = None
    why: str = ""

    def same_as(self, other: Schedule) -> bool:
        """Does it do the same, whatever is expected of it?"""
        return self.over_provision == other.over_provision and self.refill == other.refill


def first_schedule(*, may_defer: bool) -> Schedule:
    """What is in force until something is known of the lengths.

    `may_defer`: length buckets can be had. Their store takes batches to fill, so that is begun at
    once.
    """
    return Schedule(
        over_provision=FixedRatio(ratio=FIRST_RATIO),
        refill=LengthBuckets() if may_defer else Wave(),
        why="nothing is known of the lengths yet: half a batch more than needed",
    )
