"""The figures of a run: the unit, the meaning and the source of each.

Every display of figures reads them here and in :mod:`~aprilsched.observe.figures.table`, which adds
the figures of runs in progress. The classes are the content of summary.json, and the names of their
fields are a contract with all readers of run folders.

All times are seconds of the run's clock (modelled seconds on the embedded engine). An unknown
figure is None: efficiency without a step-time model, or the steady state of a run that ended before
its burn-in. "Tokens" are tokens that a policy sampled; tokens added by an environment count in
lengths only. All lengths are in tokens. A bias is a share of the mean length: 0 means unbiased,
-0.1 means 10 % too short.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.observe.figures.rollout_time import ROLLOUT_PARTS, RolloutPart

BiasReference: TypeAlias = Literal["workload_mean", "run_after_burn_in"]
MeanReference: TypeAlias = Literal["workload_mean", "drawn"]
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Unit: TypeAlias = Literal["", "seconds", "share", "tokens", "versions", "rate", "reward", "nats"]
Direction: TypeAlias = Literal["higher", "lower", "zero"]
"""Which values of a figure are better; "zero" means the values nearest to 0."""
Mean: TypeAlias = tuple[int, float]
"""A mean with the number of values behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A figure of a run.

    Attributes:
        help: one sentence of description for the reader of the metric.
        of: reads the value from its source. A histogram has none, because its values are observed
            one by one.
        name: section and name; the table names a field of summary.json by it.
        buckets: upper edges of a histogram, without the infinite one.
        tracked: whether trackers write it at each batch. If it has labels, they write the sum.
        exposed: whether it is exported to Prometheus.
        live: label in the live view, which omits figures without one.
        headline: label among the report's headlines; empty if it is not a headline.
        better: which values are better; None if neither direction is.
    """

    help: str
    of: Callable[[Any], Any] | None = None
    name: str = ""
    kind: Kind = "gauge"
    unit: Unit = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    tracked: bool = True
    exposed: bool = True
    live: str = ""
    headline: str = ""
    better: Direction | None = None

    @property
    def metric(self) -> str:
        """Its name in Prometheus, which ends with the unit."""
        own = self.name.removeprefix("run/").replace("/", "_")
        ending = {"share": "ratio", "rate": "", "reward": "", "nats": ""}.get(self.unit, self.unit)
        if ending and not own.endswith(self.unit):
            own += f"_{ending}"
        return f"aprilsched_{own}{'_total' if self.kind == 'counter' else ''}"


def figure(help: str, of: Callable[[Any], Any] | None = None, **more: Any) -> Any:
    """Return a dataclass field that is a figure; for the arguments, see :class:`Figure`."""
    return field(default=None, metadata={"figure": Figure(help=help, of=of, **more)})


def figures_in(holder: Any) -> dict[str, Figure]:
    """Return the figures among the fields of a dataclass or an instance, by field name."""
    return {f.name: f.metadata["figure"] for f in fields(holder) if "figure" in f.metadata}


def values_of(kind: type[Any], source: Any) -> dict[str, Any]:
    """Return the figures of a dataclass, taken from `source`, as arguments for its constructor."""
    return {name: each.of(source) for name, each in figures_in(kind).items() if each.of}


def headlines_in(summary: Any, path: str = "") -> Iterator[tuple[str, Figure, Any]]:
    """Yield each headline of a summary, by the path of its field, with its value."""
    known = figures_in(summary)
    for each in fields(summary):
        value, name = getattr(summary, each.name), f"{path}{each.name}"
        if each.name in known and known[each.name].headline:
            yield name, known[each.name], value
        elif is_dataclass(value) and not isinstance(value, SteadyState):
            yield from headlines_in(value, f"{name}.")


class TokenStaleness(NamedTuple):
    """Figures about the sampled tokens of a rollout; staleness is in versions.

    Attributes:
        oldest_trained: largest staleness among the tokens that count in the loss.
        masked: number of tokens that do not count in the loss.
    """

    sampled: int
    off_policy: int
    total: int
    oldest: int
    oldest_trained: int
    masked: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """Counts and times of a delivered batch.

    Attributes:
        seconds: from the previous delivery to this one, without `trainer_seconds`.
        lengths: lengths of its responses, int64 [n], tokens of the environment included.
        staleness: staleness of its responses, int64 [n, 6], with the columns of
            :class:`TokenStaleness`.
        sums: sums of these columns; for the two columns of the oldest tokens, the maximum.
        t_bound: lower bound of the batch time of any schedule on this fleet, in seconds; None
            without a model.
        distance, iid_distance: see :attr:`Figures.length_distance`.
        rewards: mean reward, under the key None, and mean of each named part.
        forecast: forecast and outcome; None if nothing was forecast.
        rollout_seconds: seconds of all its rollouts from launch to delivery, by part.
        turns: number of turns of each of its episodes.
        sessions: drift and branches of each of its sessions.
    """

    index: int
    version: int
    seconds: float
    trainer_seconds: float
    groups: int
    lengths: NDArray[np.int64]
    staleness: NDArray[np.int64]
    sums: TokenStaleness
    t_bound: float | None
    distance: float | None
    iid_distance: float | None
    rewards: Mapping[str | None, Mean]
    forecast: ForecastFigures | None
    rollout_seconds: Mapping[RolloutPart, float]
    turns: Sequence[int]
    sessions: Sequence[tuple[int, int]]

    @property
    def step_s(self) -> float:
        """Seconds of the whole step, from delivery to delivery, including the time in which the
        engines were paused for the trainer."""
        return self.seconds + self.trainer_seconds

    @property
    def figures(self) -> BatchFigures:
        """The figures of this batch."""
        return BatchFigures.over([self])


_Of: TypeAlias = Callable[[Measured], Any]
_Over: TypeAlias = Callable[[Sequence[Measured]], Any]


def _ratio(part: _Of, whole: _Of) -> _Over:
    """Return the sum of `part` divided by the sum of `whole`, over all batches that have both."""

    def of(batches: Sequence[Measured]) -> float | None:
        pairs = [(part(batch), whole(batch)) for batch in batches]
        known = [(above, below) for above, below in pairs if above is not None]
        return divided(sum(above for above, _ in known), sum(below for _, below in known))

    return of


def _largest(take: _Of) -> _Over:
    return lambda batches: max(map(take, batches), default=0)


def _sum(take: _Of) -> _Over:
    return lambda batches: sum(map(take, batches))


def _last(take: _Of) -> _Over:
    return lambda batches: take(batches[-1])


def divided(part: float | None, whole: float) -> float | None:
    """Return `part` / `whole`, or None without one of them."""
    return part / whole if part is not None and whole else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFigures:
    """Rewards of delivered rollouts."""

    rollouts: int = 0
    """Number of delivered rollouts that have a reward."""
    mean: float | None = figure(
        "Mean reward of the rollouts; absent without rewards.", unit="reward",
        headline="Reward, mean",
    )  # fmt: skip
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Mean of each named part of the reward, over the rollouts that have this part. Only the first
    100 names of a run are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastFigures:
    """The forecast and the outcome of a batch, or their means over several batches.

    `seconds` is defined as in :class:`BatchFigures`. Efficiency is T_bound over `seconds`, with
    T_bound from the step-time model of the forecast. So it is known even without a configured
    model, and may differ from the efficiency of the batch. A forecast is an average over many
    batches: single batches deviate by 10 % and more even from a correct forecast.
    """

    seconds: float
    """From the previous delivery to this one, without the trainer's seconds."""
    seconds_forecast: float
    """The seconds that were forecast."""
    efficiency: float | None
    """T_bound over the seconds, by the step times of the forecast."""
    efficiency_forecast: float
    """The efficiency that was forecast."""
    off_policy_token_share: float
    """Share of the tokens that an older version sampled."""
    off_policy_token_share_forecast: float
    """The share that was forecast."""
    batches: int = 1
    """Number of batches behind these means."""
    schedule: str = ""
    """The schedule of a single batch, and the reason of its choice, in words."""


def _rewards(batches: Sequence[Measured]) -> RewardFigures:
    """Return the means over all rollouts of the batches."""
    found: dict[str | None, list[Mean]] = {}
    for batch in batches:
        for name, mean in batch.rewards.items():
            found.setdefault(name, []).append(mean)
    means = {name: mean_of(each) for name, each in found.items()}
    rollouts, mean = means.pop(None, (0, None))
    parts = {name: value for name, (_, value) in means.items() if name is not None}
    return RewardFigures(rollouts=rollouts, mean=mean, parts=parts)


def mean_of(means: Sequence[Mean]) -> Mean:
    """Return the mean over all values behind `means`."""
    count = sum(n for n, _ in means)
    # Summing first would overflow for rewards near the largest float.
    return count, math.fsum(n / count * value for n, value in means)


def _rollout_seconds(batches: Sequence[Measured]) -> dict[RolloutPart, float]:
    """Return the mean over all rollouts of the batches."""
    count = sum(batch.lengths.size for batch in batches)
    return {
        part: (divided(sum(batch.rollout_seconds[part] for batch in batches), count) or 0.0)
        for part in ROLLOUT_PARTS
    }


def _of_sessions(place: int) -> _Over:
    """Return a function that sums entry `place` of :attr:`Measured.sessions` over all batches, and
    returns None if there were no sessions."""

    def of(batches: Sequence[Measured]) -> int | None:
        found = [session[place] for batch in batches for session in batch.sessions]
        return sum(found) if found else None

    return of


def _forecasts(batches: Sequence[Measured]) -> ForecastFigures | None:
    """Return forecast and outcome over the batches with a forecast: means of the seconds, and
    shares of all their seconds and tokens."""
    pairs = [(batch.forecast, batch.sums.sampled) for batch in batches if batch.forecast]
    if len(pairs) < 2:
        return pairs[0][0] if pairs else None

    def mean(values: Iterable[float | None], weights: Iterable[float]) -> float | None:
        weighed = list(zip(values, weights, strict=True))
        known = [(value, weight) for value, weight in weighed if value is not None]
        total = sum(weight for _, weight in known)
        return divided(sum(value * weight for value, weight in known), total)

    each, tokens = [forecast for forecast, _ in pairs], [n for _, n in pairs]
    seconds, expected = [f.seconds for f in each], [f.seconds_forecast for f in each]
    return ForecastFigures(
        seconds=sum(seconds) / len(pairs),
        seconds_forecast=sum(expected) / len(pairs),
        efficiency=mean([f.efficiency for f in each], seconds),
        efficiency_forecast=mean([f.efficiency_forecast for f in each], expected) or 0.0,
        off_policy_token_share=mean([f.off_policy_token_share for f in each], tokens) or 0.0,
        off_policy_token_share_forecast=mean(
            [f.off_policy_token_share_forecast for f in each], tokens
        )
        or 0.0,
        batches=len(pairs),
    )


# fmt: off
@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The figures of a batch, or of several batches together."""

    delivered_tokens_per_s: float | None = figure(
        "Sampled tokens over the seconds, those of the trainer included.", unit="rate",
        of=_ratio(lambda b: b.sums.sampled, lambda b: b.step_s),
        headline="Delivered tokens per second", better="higher",
    )
    efficiency: float | None = figure(
        "T_bound over the seconds; absent without a step-time model. Above 1 if much was "
        "generated before the first batch.", unit="share",
        of=_ratio(lambda b: b.t_bound, lambda b: b.seconds),
        live="efficiency", headline="Efficiency", better="higher",
    )
    off_policy_token_share: float | None = figure(
        "Share of the tokens that were sampled by an older version than the consuming one.",
        unit="share", of=_ratio(lambda b: b.sums.off_policy, lambda b: b.sums.sampled),
        headline="Off-policy tokens", better="lower",
    )
    staleness_mean: float | None = figure(
        "Consuming version minus sampling version, over tokens.", unit="versions",
        of=_ratio(lambda b: b.sums.total, lambda b: b.sums.sampled),
        live="staleness", headline="Staleness, mean", better="lower",
    )
    staleness_max: int = figure(
        "Consuming version minus that of the oldest token.", unit="versions",
        of=_largest(lambda b: b.sums.oldest),
        live="max", headline="Staleness, largest", better="lower",
    )
    staleness_max_trained: int = figure(
        "The largest staleness among tokens with loss mask 1: what `max_staleness` bounds.",
        unit="versions", of=_largest(lambda b: b.sums.oldest_trained),
    )
    mean_length: float | None = figure(
        "Mean length of the responses.", unit="tokens",
        of=_ratio(lambda b: int(b.lengths.sum()), lambda b: b.lengths.size),
    )
    max_length: int = figure(
        "Length of the longest response.", unit="tokens",
        of=_largest(lambda b: int(b.lengths.max())),
    )
    length_distance: float | None = figure(
        "Kolmogorov's distance of a batch's response lengths from the distribution of all "
        "lengths: the largest difference of the two distribution functions, 0 to 1. The latter is "
        "estimated when the batch is delivered, from the 4,096 responses launched last, unfinished "
        "ones included.", unit="share", of=_ratio(lambda b: b.distance, lambda b: 1),
        live="length distance",
    )
    iid_length_distance: float | None = figure(
        "Expected length distance of random groups with as many responses.",
        unit="share", of=_ratio(lambda b: b.iid_distance, lambda b: 1), live="at random",
    )
    rewards: RewardFigures = figure(
        "Rewards of delivered rollouts.", of=_rewards, tracked=False, exposed=False,
    )
    forecast: ForecastFigures | None = figure(
        "What automatic scheduling expected, and what happened, over the batches that had a "
        "forecast when they started; None if no batch had one.", of=_forecasts, tracked=False,
        exposed=False,
    )
    rollout_seconds: dict[RolloutPart, float] = figure(
        "Mean seconds of a rollout by activity; they add up to the time from its launch to "
        "its delivery.", of=_rollout_seconds, tracked=False, exposed=False,
    )
    turns_mean: float | None = figure(
        "Mean number of turns of an episode; absent without episodes.",
        of=_ratio(lambda b: sum(b.turns), lambda b: len(b.turns)),
        live="turns",
    )
    tool_share: float | None = figure(
        "Share of the rollouts' time, from launch to delivery, in which they used tools; absent "
        "without episodes.", unit="share",
        of=_ratio(lambda b: b.rollout_seconds["tools"] if b.turns else None,
                  lambda b: sum(b.rollout_seconds.values())),
        live="at tools",
    )
    drift_tokens: int | None = figure(
        "Tokens of sessions that would differ if their chats were tokenised again; absent "
        "without sessions.", unit="tokens", of=_of_sessions(0),
    )
    branches: int | None = figure(
        "Branches started by requests of sessions, the first ones included; absent without "
        "sessions.", of=_of_sessions(1),
    )

    @classmethod
    def over(cls, batches: Sequence[Measured], /, **more: Any) -> Self:
        """Return the figures of `batches`, with other fields of the class."""
        return cls(**values_of(cls, batches), **more)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFigures(Figures):
    """One batch."""

    index: int = figure("Number of the batch.", _last(lambda b: b.index), exposed=False,
                        tracked=False)
    version: int = figure("Policy version that consumes the batch.", _last(lambda b: b.version))
    seconds: float = figure(
        "Seconds since the previous delivery, without those of the trainer.",
        _sum(lambda b: b.seconds), unit="seconds",
    )
    trainer_seconds: float = figure(
        "Seconds in which the engines were paused for the trainer (synchronous pace only).",
        _sum(lambda b: b.trainer_seconds), unit="seconds",
    )
    groups: int = figure("Groups with a rollout in the batch.", _sum(lambda b: b.groups))
    rollouts: int = figure("Rollouts of the batch.", _sum(lambda b: b.lengths.size))
    tokens: int = figure("Sampled tokens of the batch.", _sum(lambda b: b.sums.sampled),
                         unit="tokens")
    t_bound: float | None = figure(
        "Least seconds of any schedule for these responses on this fleet; absent without a "
        "step-time model.", _last(lambda b: b.t_bound), unit="seconds",
    )
# fmt: on

    @property
    def step_s(self) -> float:
        """Seconds of the whole step, from delivery to delivery, including the time in which the
        engines were paused for the trainer."""
        return self.seconds + self.trainer_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadyState(Figures):
    """The same figures over the batches after the burn-in."""

    burn_in: int
    """Number of batches left out at the start."""
    batches: int
    mean_batch_seconds: float | None


def steady_state(batches: Sequence[Measured], burn_in: int) -> SteadyState:
    """Return the figures of the batches after the first `burn_in`."""
    kept = batches[burn_in:]
    return SteadyState.over(
        kept,
        burn_in=burn_in,
        batches=len(kept),
        mean_batch_seconds=divided(sum(batch.seconds for batch in kept), len(kept)),
    )
