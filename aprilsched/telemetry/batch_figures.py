"""The figures of batches: of each as it is delivered, and over many.

All functions here are pure. :class:`BatchMeter` is the listener that calls :func:`measure` at each
delivery. It keeps only what the batch in work needs, however long a run is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import DeliveredRollout
from aprilsched.core.policies.schedule import Forecast
from aprilsched.telemetry.base import DispatchingListener
from aprilsched.telemetry.figures import (
    BatchFigures,
    BiasFigures,
    ForecastFigures,
    RewardFigures,
    StalenessFigures,
    SteadyState,
)
from aprilsched.types import NO_VERSION

# Computes the staleness of a rollout's tokens from its segments.
#
# The figures are exact, although the single tokens are not looked at: a rollout of thousands of
# tokens has only a few segments of one version each.


class Ages(NamedTuple):
    """Figures about the sampled tokens of a rollout; ages are in versions.

    Attributes:
        oldest_trained: largest age among the tokens that count in the loss.
        masked: number of tokens that do not count in the loss.
    """

    sampled: int
    off_policy: int
    total: int
    oldest: int
    oldest_trained: int
    masked: int


def ages_of(rollout: DeliveredRollout, version: int) -> Ages:
    """The ages of a rollout's tokens if the policy `version` is trained on it."""
    sampled = off_policy = total = oldest = oldest_trained = 0
    # The masked tokens are those older than some version, so they are subtracted from the oldest
    # segments first.
    masked = rollout.masked
    segments = sorted(rollout.segments, key=_version) if masked else rollout.segments
    for start, end, sampled_under, _ in segments:
        if sampled_under == NO_VERSION:
            continue
        tokens = end - start
        sampled += tokens
        is_masked = 0 < tokens <= masked
        if is_masked:
            masked -= tokens
        # The tokens may be of a newer version than the trainer's, which somebody else has loaded.
        # Their age is then 0 and not negative.
        age = max(0, version - sampled_under)
        total += age * tokens
        off_policy += tokens if sampled_under != version else 0
        if age > 0:
            oldest = max(oldest, age)
            if age > oldest_trained and not is_masked:
                oldest_trained = age
    return Ages(sampled, off_policy, total, oldest, oldest_trained, rollout.masked)


def sampled_tokens(rollout: DeliveredRollout) -> int:
    """Number of tokens of the response that a policy sampled."""
    return sum([end - start for start, end, version, _ in rollout.segments if version >= 0])


def _version(segment: tuple[int, int, int, str | None]) -> int:
    return segment[2]


# --- batch figures -------------------------------------------------------------------------------

Bound = Callable[[Sequence[int], Sequence[int]], float]
"""Prompt lengths and response lengths to T_bound of the whole fleet, in seconds."""

Mean: TypeAlias = tuple[int, float]
"""A mean with the number of values behind it."""

_PART_NAMES = 100


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """A batch's figures, and the exact counts behind its shares and means.

    Arrays are int64 [n], one entry for each rollout.
    """

    figures: BatchFigures
    length: int
    """Sum of the response lengths, tokens of the environment included."""
    off_policy: int
    staleness_sum: int
    staleness_max_trained: int
    masked: int
    lengths: NDArray[np.int64]
    sampled_by_rollout: NDArray[np.int64]
    """Tokens that a policy sampled."""
    off_policy_by_rollout: NDArray[np.int64]
    staleness_by_rollout: NDArray[np.int64]
    """Sum over those tokens."""
    oldest_by_rollout: NDArray[np.int64]
    """Staleness of the oldest of them."""
    reward_means: Mapping[str | None, Mean]
    """Means of the rewards, under None, and of each named part of them."""


def measure(
    batch: of.BatchDelivered,
    *,
    seconds: float,
    trainer_seconds: float,
    bound: Bound | None,
    parts: set[str] | None = None,
    forecast: Forecast | None = None,
    schedule: str = "",
) -> Measured:
    """The figures of a batch that took `seconds`, with the `forecast` for it and its `schedule` in
    words. `parts` has the names of the parts of rewards that are counted so far, and gets the new
    ones of this batch, up to 100 in all."""
    rollouts = batch.rollouts
    ages = [ages_of(rollout, batch.version) for rollout in rollouts]
    lengths = [rollout.tokens for rollout in rollouts]
    length = sum(lengths)
    prompts = [r.prompt_tokens for r in rollouts]
    t_bound = None if bound is None else bound(prompts, lengths)
    tokens = sum(age.sampled for age in ages)
    off_policy = sum(age.off_policy for age in ages)
    staleness_sum = sum(age.total for age in ages)
    reward_means = _reward_means(rollouts, set() if parts is None else parts)
    return Measured(
        figures=BatchFigures(
            index=batch.batch,
            version=batch.version,
            seconds=seconds,
            trainer_seconds=trainer_seconds,
            groups=len({rollout.group_id for rollout in rollouts}),
            rollouts=len(rollouts),
            tokens=tokens,
            mean_length=length / len(lengths),
            off_policy_token_share=_ratio(off_policy, tokens) or 0.0,
            staleness_mean=_ratio(staleness_sum, tokens) or 0.0,
            staleness_max=max(age.oldest for age in ages),
            t_bound=t_bound,
            efficiency=None if t_bound is None else _ratio(t_bound, seconds),
            rewards=_reward_figures(reward_means),
            length_distance=batch.distance,
            iid_length_distance=batch.iid_distance,
            forecast=None
            if forecast is None
            else ForecastFigures(
                seconds=seconds,
                seconds_forecast=forecast.step_seconds,
                efficiency=_ratio(forecast.bound_seconds(prompts, lengths), seconds),
                efficiency_forecast=forecast.efficiency,
                off_policy_token_share=_ratio(off_policy, tokens) or 0.0,
                off_policy_token_share_forecast=forecast.off_policy_share,
                schedule=schedule,
            ),
        ),
        length=length,
        off_policy=off_policy,
        staleness_sum=staleness_sum,
        staleness_max_trained=max(age.oldest_trained for age in ages),
        masked=sum(age.masked for age in ages),
        lengths=np.array(lengths, dtype=np.int64),
        sampled_by_rollout=np.array([age.sampled for age in ages], dtype=np.int64),
        off_policy_by_rollout=np.array([age.off_policy for age in ages], dtype=np.int64),
        staleness_by_rollout=np.array([age.total for age in ages], dtype=np.int64),
        oldest_by_rollout=np.array([age.oldest for age in ages], dtype=np.int64),
        reward_means=reward_means,
    )


def rewards(batches: Sequence[Measured]) -> RewardFigures:
    """Means over all rollouts of the batches."""
    found: dict[str | None, list[Mean]] = {}
    for batch in batches:
        for name, mean in batch.reward_means.items():
            found.setdefault(name, []).append(mean)
    return _reward_figures({name: _mean(means) for name, means in found.items()})


def _reward_means(
    rollouts: Sequence[of.DeliveredRollout], parts: set[str]
) -> dict[str | None, Mean]:
    found: dict[str | None, list[Mean]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            found.setdefault(None, []).append((1, rollout.reward))
        for name, value in rollout.reward_parts.items():
            # Otherwise names that differ from prompt to prompt would need memory without end.
            if name in parts or len(parts) < _PART_NAMES:
                parts.add(name)
                found.setdefault(name, []).append((1, value))
    return {name: _mean(values) for name, values in found.items()}


def _mean(means: Sequence[Mean]) -> Mean:
    """The mean over all values that `means` are means of."""
    count = sum(n for n, _ in means)
    # Not the sum first, which is infinite for rewards that are as large as a float can be.
    return count, math.fsum(n / count * value for n, value in means)


def _reward_figures(means: Mapping[str | None, Mean]) -> RewardFigures:
    rollouts, mean = means.get(None, (0, None))
    parts = {name: value for name, (_, value) in means.items() if name is not None}
    return RewardFigures(rollouts=rollouts, mean=mean, parts=parts)


def delivered_tokens_per_s(batches: Sequence[Measured]) -> float | None:
    """Tokens over seconds, the trainer's included."""
    figures = [batch.figures for batch in batches]
    seconds = sum(f.seconds + f.trainer_seconds for f in figures)
    return _ratio(sum(f.tokens for f in figures), seconds)


def efficiency(batches: Sequence[Measured]) -> float | None:
    """Sum of the bounds over sum of the seconds."""
    bounds = [batch.figures.t_bound for batch in batches]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds):
        return None
    return _ratio(sum(known), sum(batch.figures.seconds for batch in batches))


def off_policy_token_share(batches: Sequence[Measured]) -> float | None:
    """Share of the tokens whose version is older than the one that consumes them."""
    return _ratio(sum(b.off_policy for b in batches), sum(b.figures.tokens for b in batches))


def forecasts(batches: Sequence[Measured]) -> ForecastFigures | None:
    """Forecast and outcome over the batches that had a forecast: means of the seconds, and shares
    of all their seconds and tokens."""
    found = [batch.figures.forecast for batch in batches]
    pairs = [(f, b) for f, b in zip(found, batches, strict=True) if f is not None]
    tokens = sum(batch.figures.tokens for _, batch in pairs)
    seconds, expected = (
        sum(each.seconds for each, _ in pairs),
        sum(each.seconds_forecast for each, _ in pairs),
    )
    if not (tokens and seconds and expected):
        return None
    bounds = [None if e.efficiency is None else e.efficiency * e.seconds for e, _ in pairs]
    known = [bound for bound in bounds if bound is not None]
    return ForecastFigures(
        seconds=seconds / len(pairs),
        seconds_forecast=expected / len(pairs),
        efficiency=sum(known) / seconds if len(known) == len(pairs) else None,
        efficiency_forecast=sum(e.efficiency_forecast * e.seconds_forecast for e, _ in pairs)
        / expected,
        off_policy_token_share=sum(batch.off_policy for _, batch in pairs) / tokens,
        off_policy_token_share_forecast=sum(
            e.off_policy_token_share_forecast * batch.figures.tokens for e, batch in pairs
        )
        / tokens,
        batches=len(pairs),
    )


def staleness(batches: Sequence[Measured]) -> StalenessFigures:
    """Mean over tokens, and the largest."""
    tokens = sum(batch.figures.tokens for batch in batches)
    return StalenessFigures(
        mean=_ratio(sum(batch.staleness_sum for batch in batches), tokens) or 0.0,
        max=max((batch.figures.staleness_max for batch in batches), default=0),
        max_trained=max((batch.staleness_max_trained for batch in batches), default=0),
    )


def steady_state(batches: Sequence[Measured], burn_in: int) -> SteadyState:
    """The figures of the batches after the first `burn_in`."""
    kept = batches[burn_in:]
    seconds = sum(batch.figures.seconds for batch in kept)
    return SteadyState(
        burn_in=burn_in,
        batches=len(kept),
        mean_batch_seconds=_ratio(seconds, len(kept)),
        mean_length=_mean_length(kept),
        delivered_tokens_per_s=delivered_tokens_per_s(kept),
        efficiency=efficiency(kept) if kept else None,
        off_policy_token_share=off_policy_token_share(kept),
        length_distance=_mean_known([batch.figures.length_distance for batch in kept]),
        iid_length_distance=_mean_known([batch.figures.iid_length_distance for batch in kept]),
        forecast=forecasts(kept),
    )


def bias(batches: Sequence[Measured], burn_in: int, workload_mean: float | None) -> BiasFigures:
    """The length bias of what was delivered.

    By conservation (every unfinished sample is carried over and finishes) the whole run's bias is
    -I * (l / mu - 1) / (K * N) for I samples in flight of mean final length l, and goes to zero.
    What l is only shows when they finish, so the left side of the identity is given: the mean
    delivered length over mu, minus 1.
    """
    long_run = _mean_length(batches[burn_in:])
    overall = _mean_length(batches)
    reference = long_run if workload_mean is None else workload_mean
    known = overall is not None and reference is not None
    kind = "run_after_burn_in" if workload_mean is None else "workload_mean"
    return BiasFigures(
        first_batch_length_bias=_excess(_mean_length(batches[:1]), long_run),
        bias_estimate=_excess(overall, reference),
        bias_reference=kind if known else None,
        workload_mean_length=workload_mean,
        long_run_mean_length=long_run,
        delivered_mean_length=overall,
        delivered_mean_length_by_batch=[batch.figures.mean_length for batch in batches],
        length_distance_by_batch=[batch.figures.length_distance for batch in batches],
        iid_length_distance_by_batch=[batch.figures.iid_length_distance for batch in batches],
    )


def _mean_length(batches: Sequence[Measured]) -> float | None:
    return _ratio(sum(b.length for b in batches), sum(b.figures.rollouts for b in batches))


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _ratio(sum(known), len(known))


def _excess(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference - 1


def _ratio(part: float | None, whole: float) -> float | None:
    return part / whole if part is not None and whole else None


class BatchMeter(DispatchingListener):
    """Listens to a run and measures each batch, without the trainer's own time.

    Args:
        trainer_waits: whether the engines are paused while the trainer trains (synchronous pace),
            at first; a schedule of the other pace changes it. Then the trainer's time does not
            count as the schedule's.
        bound: gives T_bound of a batch in seconds; None if no step-time model is known.

    Attributes:
        latest: the batch that was delivered last; None before the first.
        trainer_seconds: the trainer's own time, over all batches.
    """

    def __init__(self, *, trainer_waits: bool, bound: Bound | None = None) -> None:
        super().__init__()
        self.latest: Measured | None = None
        self.trainer_seconds = 0.0
        self._trainer_waits = trainer_waits
        self._bound = bound
        self._parts: set[str] = set()
        """Names of the parts of rewards that are counted."""
        self._began = False
        self._delivered_at = 0.0
        self._trainer = 0.0
        """Seconds of the trainer since the last delivery."""
        self._schedule = of.ScheduleChanged(schedule="")
        """The schedule in force."""
        self._expected = self._schedule
        """The schedule that was in force when the batch in work began."""
        self._idle_since: float | None = None
        """Since when the trainer has the last batch, and nothing else happens."""
        self._handlers = {
            of.RunOpened: self._opened,
            of.BatchRequested: self._busy,
            of.UpdateBegun: self._busy,
            of.UpdateFinished: self._idle,
            of.BatchDelivered: self._delivered,
            of.ScheduleChanged: self._schedule_changed,
        }

    def deliver(self, batch: of.BatchDelivered, now: float) -> Measured:
        """The figures of `batch`, which is delivered `now`."""
        took = now - self._delivered_at - self._trainer
        self.latest = measure(
            batch,
            seconds=took,
            trainer_seconds=self._trainer,
            bound=self._bound,
            parts=self._parts,
            forecast=self._expected.forecast,
            schedule=self._expected.schedule,
        )
        self._expected = self._schedule
        self._trainer = 0.0
        self._delivered_at = self._idle_since = now
        return self.latest

    def _delivered(self, fact: of.BatchDelivered) -> None:
        if fact.again:
            self._idle(fact)
        else:
            self.deliver(fact, self._now)

    def _schedule_changed(self, fact: of.ScheduleChanged) -> None:
        self._schedule = fact
        if self.latest is not None and self._now == self._delivered_at:
            # It was chosen at the end of the batch before, in no time.
            self._expected = fact
        if fact.pace is not None:
            idle = self._idle_since is not None
            self._stop_idling()
            self._trainer_waits = fact.pace == "synchronous"
            self._idle_since = self._now if idle else None

    def _opened(self, _: of.RunOpened) -> None:
        # What a prior run expected of the batch in work took no account of its end.
        self._expected = of.ScheduleChanged(schedule="")
        if self._began:
            self._stop_idling()
        else:
            self._began = True
            self._delivered_at = self._now
        self._idle_since = self._now

    def _busy(self, _: of.BatchRequested | of.UpdateBegun) -> None:
        self._stop_idling()

    def _idle(self, _: of.UpdateFinished | of.BatchDelivered) -> None:
        self._idle_since = self._now

    def _stop_idling(self) -> None:
        if self._idle_since is not None and self._trainer_waits:
            self._trainer += self._now - self._idle_since
            self.trainer_seconds += self._now - self._idle_since
        self._idle_since = None
