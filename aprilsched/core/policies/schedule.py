"""What automatic scheduling chooses: the policies that may change during a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aprilsched.core.policies.length_buckets import LengthBuckets
from aprilsched.core.policies.over_provision import FixedRatio, OverProvision
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.wave import Wave

__all__ = ["Forecast", "Pace", "Schedule", "first_schedule"]

Pace: TypeAlias = Literal["synchronous", "asynchronous"]

FIRST_RATIO = 1.5
"""Near the flat part of every optimum that was measured, and never very stale."""


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
            because of what earlier batches did (:mod:`aprilsched.planning.bias`).
        token_seconds: seconds of T_bound for each token, by the step-time model of the trials.
        read_seconds: seconds of T_bound for each context token that is read, by that model.
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

    def bound_seconds(self, prompt_lengths: Sequence[int], lengths: Sequence[int]) -> float | None:
        """T_bound of these responses, in seconds, as the efficiency counts it
        (:meth:`~aprilsched.timing.model.StepTimeModel.bound_seconds`, divided by the number of
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
        forecast: what is expected of its batches; None if that is not known.
        why: the reason of the choice, as one sentence.
    """

    over_provision: OverProvision
    refill: Refill
    pace: Pace | None = None
    forecast: Forecast | None = None
    why: str = ""

    def same_as(self, other: Schedule) -> bool:
        """Whether both have the same policies, whatever is expected of them."""
        return (
            self.over_provision == other.over_provision
            and self.refill == other.refill
            and self.pace == other.pace
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
    if waits:
        return Schedule(
            over_provision=FixedRatio(ratio=1.0),
            refill=LengthBuckets(store=4.0, probe_after=0.97) if may_defer else Wave(),
            pace=pace,
            why="nothing is known of the lengths yet, and no token may be stale: wait for all",
        )
    return Schedule(
        over_provision=FixedRatio(ratio=FIRST_RATIO),
        refill=LengthBuckets() if may_defer else Wave(),
        pace=pace,
        why="nothing is known of the lengths yet: half a batch more than needed",
    )
