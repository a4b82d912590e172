"""What automatic scheduling chooses: the policies that may change during a run."""

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

RATIO = Bound(least=1, most=64, words="a ratio from 1 (wait for all) to 64")
"""The over-provision ratio rho = C / N (APRIL's over-sampling; 2 in its paper)."""


Pace: TypeAlias = Literal["synchronous", "asynchronous"]

FIRST_RATIO = 1.5
"""Near the flat part of every optimum that was measured, and never very stale."""


_DRIVEN = 0.9
"""Share of a step that must be as long as the engines make it for its work alone to count."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """What is expected of a batch under a schedule, in the mean over many batches.

    Attributes:
        step_seconds: seconds from one delivery to the next, without the trainer's own time where
            the engines wait for the trainer.
        efficiency: T_bound / T, the bound on a batch's time over its time.
        off_policy_share: share of the delivered tokens that are older than the version that
            consumes them.
        mean_age: mean number of versions by which a delivered token is older; None if unknown.
        distance: distance of a batch's lengths from the drawn law; None if unknown.
        driven: share of `step_seconds` that is as long as the engines make it; 0 where the trainer
            alone decides how long a step takes.
        correction: factor by which the engines of the trials were taken to be faster than modelled,
            because of what earlier batches did (:mod:`aprilsched.planning.planner`).
        token_seconds: seconds of T_bound for each token, by the step-time model of the trials.
        read_seconds: seconds of T_bound for each context token that is read, by that model.
        explained: work and time of a batch that are expected of the schedule that was in force,
            over those of its own forecast, both without a correction: what was learned since then
            of the lengths and of the trainer.
        batches: number of batches whose lengths the trials had.
    """

    step_seconds: float
    efficiency: float
    off_policy_share: float
    mean_age: float | None = None
    distance: float | None = None
    driven: float = 1.0
    correction: float = 1.0
    token_seconds: float | None = None
    read_seconds: float | None = None
    explained: tuple[float, float] = (1.0, 1.0)
    batches: int = 0

    @property
    def hidden(self) -> bool:
        """Whether the trainer decides how long a step takes, so that the work of a step tells
        nothing of the engines. With a trainer of 20 s, batches that took the trainer's time while
        engines filled up with work made forecasts of 17 s for such steps. By their time alone,
        batches that used such work up made forecasts of 3.3 s for steps of 3.8 s."""
        return self.driven < _DRIVEN

    def bound_seconds(self, prompt_lengths: Sequence[int], lengths: Sequence[int]) -> float | None:
        """T_bound of these responses, in seconds, as the efficiency counts it
        (:meth:`~aprilsched.planning.step_times.model.StepTimeModel.bound_seconds`, divided by the
        number of engines); None if it is not known."""
        if self.token_seconds is None or self.read_seconds is None:
            return None
        pairs = zip(prompt_lengths, lengths, strict=True)
        reads = sum(length * (prompt + length / 2) for prompt, length in pairs)
        return self.token_seconds * sum(lengths) + self.read_seconds * reads


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How much is started and when, with what this is expected to do.

    Attributes:
        over_provision: how many groups are kept open.
        refill: when new groups are started.
        pace: whether generation goes on while the trainer trains; None for the configured pace.
        placement: which engine a request goes to; None for the configured placement.
        forecast: what is expected of its batches; None if that is not known.
        why: the reason of the choice, as one sentence.
    """

    over_provision: float
    refill: Refill
    pace: Pace | None = None
    placement: Placement | None = None
    forecast: Forecast | None = None
    why: str = ""

    def target_groups(self, batch_groups: int) -> int:
        """Groups to have open (generating, or ready and undelivered) for the next batch, which
        takes `batch_groups` of them."""
        # Guards against 1.1 * 10 = 11.000000000000002 rounding up to 12.
        return math.ceil(self.over_provision * batch_groups - 1e-9)

    def same_as(self, other: Schedule) -> bool:
        """Whether both have the same policies, whatever is expected of them."""
        return (
            self.over_provision == other.over_provision
            and self.refill == other.refill
            and self.pace == other.pace
            and self.placement == other.placement
        )


def first_schedule(*, may_defer: bool, pace: Pace | None = None, waits: bool = False) -> Schedule:
    """The schedule that is used until some lengths are known.

    Args:
        may_defer: length buckets are possible. Their many open groups take several batches to
            open, so this begins at once.
        pace: the pace with which it begins; None for the configured one.
        waits: every batch must wait for all groups that it runs, because what they have at an
            update is thrown away.
    """
    buckets = LengthBuckets(store=4.0, probe_after=0.97) if waits else LengthBuckets()
    return Schedule(
        over_provision=1.0 if waits else FIRST_RATIO,
        refill=buckets if may_defer else Wave(),
        pace=pace,
        why="nothing is known of the lengths yet, and no token may be stale: wait for all"
        if waits
        else "nothing is known of the lengths yet: half a batch more than needed",
    )
