"""What automatic scheduling chooses: the policies that may change during a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from aprilsched.kernel.core.policies.placement import Placement
from aprilsched.kernel.core.policies.refill import LengthBuckets, Refill, Wave
from aprilsched.kernel.values.bounds import ABOVE_0, SHARE_OR_0, Bound
from aprilsched.kernel.values.checks import suggesting

RATIO = Bound(least=1, most=64, words="a ratio from 1 (wait for all) to 64")
"""The over-provision ratio rho = C / N (APRIL's over-sampling; 2 in its paper)."""


# --- objective -----------------------------------------------------------------------------------

# What automatic scheduling wants: useful work for the time of whole steps.
#
# A step is everything from one batch to the next: generation, the pause, the refit, the
# recomputation of contexts, and the trainer's own time as far as generation does not go on
# meanwhile. Its useful work is
#
#     sum over its tokens of w * exp(-k / usefulness_age), times (1 - distance_price * d)
#
# where w is the token's share of T_bound, k its age in versions, and d how much farther the
# lengths of the batch are from the drawn law than those of a batch drawn at random. A token beyond
# the bound on staleness has loss mask 0 and is of no use.


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What a stale token and a batch of unusual lengths cost a training run."""

    usefulness_age: Annotated[float, ABOVE_0] = 100.0
    """Age in versions at which a token is worth 1/e of a fresh one; ``math.inf`` if age costs
    nothing. The default is the dearest price within the interval that experiments/learning measured
    with decoupled PPO (1 % for each version), whose estimate is no cost at all. With PPO's clip
    around the sampling policy it measured 17 (15 to 19), so give that for such a loss."""
    distance_price: Annotated[float, SHARE_OR_0] = 0.1
    """Share of a batch's worth that is lost where its lengths are as far from the drawn law as
    possible (a distance of 1, beyond that of a batch drawn at random); 0 if that costs nothing.
    experiments/learning could not tell a cost, so the default only decides between schedules that
    are otherwise nearly as good."""
    tolerance: Annotated[float, SHARE_OR_0] = 0.01
    """Share of the useful work for each second that may be given up for fewer stale tokens. Optima
    are flat: many schedules are as good as the best one within noise, with very different
    staleness."""

    def usefulness(self, tokens_by_age: Mapping[int, float], *, bound: int | None) -> float:
        """Mean usefulness of the tokens, from 0 to 1; with none at all it is 1.

        Args:
            tokens_by_age: number of tokens by their age in versions.
            bound: age beyond which tokens have loss mask 0; None without one.
        """
        total = sum(tokens_by_age.values())
        if not total:
            return 1.0
        counts = {k: n for k, n in tokens_by_age.items() if bound is None or k <= bound}
        return sum(n * math.exp(-k / self.usefulness_age) for k, n in counts.items()) / total

    def share_left(self, distance: float, iid_distance: float) -> float:
        """Share of a batch's worth that its lengths leave, by their distance from the drawn law and
        that of a batch drawn at random."""
        return 1 - self.distance_price * max(0.0, distance - iid_distance)


# --- schedule ------------------------------------------------------------------------------------

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
        (:meth:`~aprilsched.planning.step_times.model.StepTimeModel.bound_seconds`, divided by the number of
        engines); None if it is not known."""
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
