"""The choice of automatic scheduling: the policies that may change during a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aprilsched.kernel.core.policies.length_buckets import LengthBuckets
from aprilsched.kernel.core.policies.placement import Placement
from aprilsched.kernel.core.policies.refill import Refill
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.kernel.values.bounds import Bound

RATIO = Bound(least=1, most=64, words="a ratio from 1 (synchronous) to 64")
"""The over-provision ratio rho = C / N (APRIL's over-sampling; 2 in its paper)."""


Pace: TypeAlias = Literal["synchronous", "asynchronous"]

FIRST_RATIO = 1.5
"""Near the flat part of every measured optimum, and never very stale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The expected results of a batch under a schedule, on average over many batches.

    Attributes:
        step_seconds: seconds from one delivery to the next, without the trainer's own time if the
            engines wait for the trainer.
        efficiency: T_bound / T, the bound on a batch's time over its time.
        off_policy_share: share of the delivered tokens that are older than the version that
            consumes them.
        mean_staleness: mean number of versions by which a delivered token is older; None if
            unknown.
        distance: distance of a batch's lengths from the drawn distribution; None if unknown.
        token_seconds: seconds of T_bound for each token, by the step-time model of the trials.
        read_seconds: seconds of T_bound for each context token that is read, by that model.
    """

    step_seconds: float
    efficiency: float
    off_policy_share: float
    mean_staleness: float | None = None
    distance: float | None = None
    token_seconds: float | None = None
    read_seconds: float | None = None

    def bound_seconds(self, prompt_lengths: Sequence[int], lengths: Sequence[int]) -> float | None:
        """Return T_bound of these responses in seconds, as in the efficiency; None if unknown.

        It is :meth:`~aprilsched.planning.step_times.model.StepTimeModel.bound_seconds`, divided by
        the number of engines.
        """
        if self.token_seconds is None or self.read_seconds is None:
            return None
        pairs = zip(prompt_lengths, lengths, strict=True)
        reads = sum(length * (prompt + length / 2) for prompt, length in pairs)
        return self.token_seconds * sum(lengths) + self.read_seconds * reads


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How many groups start and when, with the expected results.

    Attributes:
        over_provision: number of groups that are kept open, in batches.
        refill: when new groups are started.
        pace: whether generation continues while the trainer trains; None for the configured pace.
        placement: which engine a request goes to; None for the configured placement.
        forecast: the expected results of its batches; None if unknown.
        why: the reason for the choice, in one sentence.
    """

    over_provision: float
    refill: Refill
    pace: Pace | None = None
    placement: Placement | None = None
    forecast: Forecast | None = None
    why: str = ""

    def target_groups(self, batch_groups: int) -> int:
        """Return the number of groups to have open for the next batch, which takes `batch_groups`.

        Open groups are generating, or ready and undelivered.
        """
        # Guards against 1.1 * 10 = 11.000000000000002 rounding up to 12.
        return math.ceil(self.over_provision * batch_groups - 1e-9)

    def same_as(self, other: Schedule) -> bool:
        """Return whether both have the same policies, whatever their forecasts."""
        return (
            self.over_provision == other.over_provision
            and self.refill == other.refill
            and self.pace == other.pace
            and self.placement == other.placement
        )


def first_schedule(*, may_defer: bool, pace: Pace | None = None, waits: bool = False) -> Schedule:
    """Return the schedule that is used until some lengths are known.

    Args:
        may_defer: whether length buckets are possible. Opening their many groups takes several
            batches, so it starts at once.
        pace: the initial pace; None for the configured one.
        waits: whether every batch must wait for all groups that it runs, because their tokens are
            discarded at an update.
    """
    buckets = LengthBuckets(store=4.0, probe_after=0.97) if waits else LengthBuckets()
    return Schedule(
        over_provision=1.0 if waits else FIRST_RATIO,
        refill=buckets if may_defer else Wave(),
        pace=pace,
        why="nothing is known of the lengths yet, and no token may be stale: synchronous"
        if waits
        else "nothing is known of the lengths yet: half a batch more than needed",
    )
