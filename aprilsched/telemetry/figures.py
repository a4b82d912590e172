"""The fields of summary.json: their names are a contract with everybody who reads run folders.

All times are seconds of the run's clock (modelled seconds on the embedded engine). A figure that
cannot be known is None: efficiency without a step-time model, a steady state of a run that ended
before its burn-in did. "Tokens" are those that a policy sampled; tokens that an environment added
count in lengths only. All lengths are in tokens. A bias is a share of the mean length: 0 is none,
-0.1 is 10 % too short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

BiasReference: TypeAlias = Literal["workload_mean", "run_after_burn_in"]
MeanReference: TypeAlias = Literal["workload_mean", "drawn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFigures:
    """Where every launched rollout is. Counted from ids, not taken from the scheduler's counts."""

    launched: int
    delivered: int
    """In batches and evaluations."""
    evaluated: int
    """Those of them in evaluations."""
    in_flight: int
    """Neither delivered nor dropped when the run ended: carried, or finished early."""
    lost: int
    """Launched, and nowhere: a bug unless 0."""
    duplicated: int
    """Delivered more than once: a bug unless 0."""
    dropped: dict[str, int]
    """By reason, as the ledger names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFigures:
    generated: int
    """Arrived from engines."""
    delivered: int
    reprefilled: int
    """Context tokens computed again after an interruption."""
    discarded: int
    """Of dropped rollouts."""
    masked: int
    """Delivered with loss mask 0, because they passed the staleness bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondsFigures:
    wall: float
    """From the opened fleet to the last thing that happened."""
    trainer: float
    """Of it, spent by the trainer while the run waited for it (synchronous pace only)."""
    pause: float
    """An engine's mean time from its pause calls to the ends of its continue calls."""
    update: float
    """From the requests for a new version to their ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessFigures:
    """Consuming version minus sampling version, of delivered tokens."""

    mean: float
    """Over tokens."""
    max: int
    max_trained: int
    """The largest among tokens with loss mask 1: what `max_staleness` bounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFigures:
    """Rewards of delivered rollouts."""

    rollouts: int = 0
    """Number of delivered rollouts that have a reward."""
    mean: float | None = None
    """Their mean reward; null if none has a reward."""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """Mean of each named part of the reward, over the rollouts that have this part. Only the first
    100 names of a run are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFigures:
    """One batch. `seconds` reach from the delivery before to its own, without `trainer_seconds`."""

    index: int
    version: int
    """The one that consumes it."""
    seconds: float
    trainer_seconds: float
    groups: int
    rollouts: int
    tokens: int
    mean_length: float
    """Of its responses, in tokens."""
    off_policy_token_share: float
    staleness_mean: float
    staleness_max: int
    t_bound: float | None
    """What no schedule can go below for these responses on this fleet, in seconds."""
    efficiency: float | None
    """t_bound / seconds. Above 1 where much of the batch was generated before it began."""
    rewards: RewardFigures = field(default_factory=RewardFigures)
    length_distance: float | None = None
    """Kolmogorov's distance of its response lengths from the law that all lengths are drawn from:
    the largest difference of the two distribution functions, 0 to 1. The law is estimated when the
    batch is delivered, from the 4,096 responses launched last, unfinished ones included."""
    iid_length_distance: float | None = None
    """The distance that is expected of a batch of as many groups drawn at random."""
    forecast: ForecastFigures | None = None
    """What automatic scheduling expected of the batch when it began; None if there was nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastFigures:
    """The forecast for a batch, or its mean over several, and what happened.

    `seconds` are those of :class:`BatchFigures`. Efficiency is T_bound over them, with T_bound by
    the step-time model that the forecast was made with, so it is known where no model was given,
    and may differ from the efficiency of the batch. The forecast is made for many batches: the
    outcome of a single one scatters by a tenth and more around a right forecast.
    """

    seconds: float
    """From the delivery before to this one, without the trainer's own."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LawFigures:
    """A law of lengths. Quantiles: the shortest length that a share of at least q reaches."""

    mean: float
    p50: float
    p90: float
    p99: float
    percentiles: list[int]
    """The quantiles at 0.01, 0.02, …, 0.99 and the longest."""
    responses: int
    """Behind it, unfinished ones included."""
    unresolved: float
    """Share of the responses that are longer than anything that has finished: what the figures
    say of them is a lower bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlightFigures:
    """Launched for training and not delivered when the run ended."""

    rollouts: int
    unfinished: int
    """Of them; the others wait for their siblings or their batch."""
    mean_tokens_so_far: float
    expected_mean_length: float
    """Of all of them in the end: tokens so far plus the mean of the rest, given those."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransientFigures:
    """The bias of what was delivered that goes to zero, because what is missing is in flight.

    With I in flight of mean final length l and K * N delivered it is -I * (l / mu - 1) / (K * N).
    """

    predicted: float
    """By that identity, from those in flight at the end."""
    measured: float
    """Mean delivered length / mu - 1. What `predicted` does not explain is the chance of the
    prompts, a censor, or a law that drifts."""
    mean: float
    """mu."""
    reference: MeanReference
    """Where mu is from: known beforehand, or estimated in this run."""
    predicted_by_batch: list[float]
    """After each batch, with the final lengths that were known or expected at the end."""
    measured_by_batch: list[float]
    """Of all delivered until then."""
    further_batches_to_1_percent: int
    """Batches after which it is at most 1 %, with as many in flight as now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecileFigures:
    """Delivered responses by tenths of equal number, the shortest first; 10 entries each."""

    mean_length: list[float]
    staleness_mean: list[float]
    """Over the sampled tokens."""
    off_policy_token_share: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class DropFigures:
    """What was dropped for one reason."""

    rollouts: int
    tokens: int
    """That they had."""
    expected_mean_length: float | None
    """They would have had in the end; None where it cannot be estimated."""
    effect: float | None
    """Bias of everything else that comes of it. It does not go away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CensoringFigures:
    """Did the schedule select responses by their length?"""

    policies: list[str]
    """The reasons, as the ledger names them, by which it did; empty for none."""
    by_reason: dict[str, DropFigures] = field(default_factory=dict[str, DropFigures])
    effect: float | None = None
    """Of those policies together."""
    warning: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasFigures:
    """Are short responses over-represented? 0 is no bias, -0.1 is 10 % too short."""

    first_batch_length_bias: float | None
    """Mean length of batch 0 / long-run mean - 1."""
    bias_estimate: float | None
    """Mean length of all delivered / `bias_reference`'s mean - 1."""
    bias_reference: BiasReference | None
    """What is held against: the workload's own mean where it is known, or this run's batches
    after the burn-in."""
    workload_mean_length: float | None
    long_run_mean_length: float | None
    """Of the batches after the burn-in."""
    delivered_mean_length: float | None
    delivered_mean_length_by_batch: list[float]
    drawn: LawFigures | None = None
    """The law that lengths are drawn from, by Kaplan and Meier's estimate: everything launched,
    with what is in flight or was dropped unfinished as censored."""
    delivered: LawFigures | None = None
    """Of what the trainer got."""
    in_flight: InFlightFigures | None = None
    transient: TransientFigures | None = None
    by_length_decile: DecileFigures | None = None
    dropped_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Discarded, by reason, as the ledger counts them."""
    censoring: CensoringFigures = field(default_factory=lambda: CensoringFigures(policies=[]))
    length_distance_by_batch: list[float | None] = field(default_factory=list[float | None])
    """See :class:`BatchFigures`."""
    iid_length_distance_by_batch: list[float | None] = field(default_factory=list[float | None])


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferenceFigures:
    """The differences of some tokens, in nats; all but `tokens` are None without a token."""

    tokens: int
    mean: float | None
    """Of d. Below 0 the trainer finds the tokens less probable than their engine did."""
    k3: float | None
    """Mean of exp(d) - 1 - d: an estimate of KL(engine, trainer) that is never negative
    (http://joschu.net/blog/kl-approx.html)."""
    largest: float | None
    """The largest magnitude of d."""
    beyond_share: float | None
    """Share of the tokens whose magnitude of d is above `bound`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchAlignmentFigures:
    """One batch."""

    batch: int
    tokens: int
    mean: float | None
    k3: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentFigures:
    """The trainer's log-probabilities against the engines', at staleness 0."""

    bound: float
    """Above it a difference is large, in nats."""
    whole: DifferenceFigures
    """All compared tokens."""
    skipped: int
    """Tokens that were not compared, because their version is not certain or they attend to keys
    of older weights."""
    not_finite: int
    """Tokens with a log-probability that is NaN or infinite; anything but 0 is a mistake."""
    by_engine: dict[str, DifferenceFigures]
    by_position: list[DifferenceFigures]
    """By position in the response, counted from 1: entry i is of the positions 2**i to
    2**(i + 1) - 1."""
    by_age: list[DifferenceFigures]
    """By staleness, of all tokens: entry 0 is the mismatch alone, and later entries contain what
    the policy has moved too. The last entry is of all older tokens."""
    by_batch: list[BatchAlignmentFigures]
    """The batches that were reported, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SteadyState:
    """The same figures over the batches after the burn-in."""

    burn_in: int
    """Batches left out at the begin."""
    batches: int
    mean_batch_seconds: float | None
    mean_length: float | None
    delivered_tokens_per_s: float | None
    efficiency: float | None
    off_policy_token_share: float | None
    length_distance: float | None = None
    """Mean distance of a batch's lengths from the drawn law, see :class:`BatchFigures`."""
    iid_length_distance: float | None = None
    """Mean of what is expected of batches drawn at random."""
    forecast: ForecastFigures | None = None
    """Forecast and outcome over the batches that had a forecast; None if none had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """What is in summary.json."""

    schema: int = 1
    """Of this file; it grows when a field changes its meaning."""
    clock: Literal["virtual", "wall"]
    """"virtual": modelled seconds, on the embedded engine."""
    interrupted: bool
    """Ended by Ctrl-C; the figures are those until then."""
    error: str | None
    """Why the run ended early otherwise."""
    event_log_error: str | None
    """Why events.jsonl is not complete."""
    engines: int
    """When the run began."""
    batches: int
    """Delivered."""
    rollouts: RolloutFigures
    tokens: TokenFigures
    seconds: SecondsFigures
    delivered_tokens_per_s: float | None
    """Delivered tokens over all batches' seconds, those of the trainer included."""
    efficiency: float | None
    """Sum of t_bound / sum of seconds, the trainer's not included."""
    off_policy_token_share: float | None
    """Delivered tokens of an older version than the one that consumes them / delivered tokens."""
    staleness: StalenessFigures
    bias: BiasFigures
    steady_state: SteadyState
    rewards: RewardFigures = field(default_factory=RewardFigures)
    alignment: AlignmentFigures | None = None
    """None unless the trainer reported its log-probabilities."""
    per_batch: list[BatchFigures] = field(default_factory=list[BatchFigures])
