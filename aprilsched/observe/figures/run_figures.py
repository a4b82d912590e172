"""The figures of a whole run, as in summary.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from aprilsched.kernel.core.state.ledger import Counters
from aprilsched.observe.figures.figures import (
    BatchFigures,
    BiasReference,
    Figures,
    MeanReference,
    SteadyState,
    figure,
    values_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFigures:
    """Launched rollouts by outcome, counted from their ids, not by the scheduler's counters."""

    launched: int
    delivered: int = figure(
        "Rollouts delivered in batches and evaluations.", headline="Responses delivered"
    )
    evaluated: int
    """Rollouts delivered in evaluations."""
    in_flight: int
    """Neither delivered nor dropped at the end of the run: carried, or finished early."""
    lost: int = figure(
        "Launched rollouts without an outcome: a bug unless 0.", headline="Lost", better="lower"
    )
    duplicated: int = figure(
        "Rollouts delivered more than once: a bug unless 0.", headline="Duplicated", better="lower"
    )
    dropped: dict[str, int] = figure(
        "Dropped rollouts by reason, as in the ledger.",
        headline="Dropped",
        better="lower",
    )


def _count(name: str, help: str, **more: Any) -> Any:
    """Return a counter of the whole run."""
    return figure(help, lambda counters: getattr(counters, name), kind="counter", **more)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFigures:
    """Tokens of the whole run, from its counters."""

    generated: int = _count("tokens_generated", "Tokens that arrived from engines.")
    delivered: int = _count("tokens_delivered", "Sampled tokens of delivered rollouts.")
    reprefilled: int = _count(
        "tokens_reprefilled",
        "Context tokens computed again after an interruption.",
        headline="Tokens recomputed",
        better="lower",
    )
    discarded: int = _count("tokens_discarded", "Sampled tokens of dropped rollouts.")
    masked: int = _count(
        "tokens_masked",
        "Tokens delivered with loss mask 0, because they passed the staleness bound.",
    )

    @classmethod
    def of(cls, counters: Counters) -> Self:
        """Return the figures at this time."""
        return cls(**values_of(cls, counters))


@dataclass(frozen=True, kw_only=True, slots=True)
class SecondsFigures:
    wall: float = figure(
        "Seconds from the opened fleet to the last event.",
        unit="seconds",
        headline="Seconds",
        better="lower",
    )
    trainer: float
    """Seconds in which the run waited for the trainer (synchronous pace only)."""
    pause: float
    """Mean seconds of an engine from its pause calls to the ends of its continue calls."""
    update: float
    """Seconds from the requests for a new version to their ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthFigures:
    """A length distribution. Quantiles: the shortest length that a share of at least q reaches."""

    mean: float
    p50: float
    p90: float
    p99: float
    lengths: list[int]
    """Lengths up to the longest at which a response is known to have ended, thinned evenly on both
    logarithmic axes of a chart."""
    longer: list[float]
    """Share of responses that are longer than each of `lengths`."""
    responses: int
    """Number of responses behind the estimate, including unfinished ones."""
    unresolved: float
    """Share of the responses that are longer than every finished one. Their lengths are lower
    bounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransientFigures:
    """The part of the length bias that goes to zero, because the missing responses are in flight.

    With I responses in flight, of mean final length l, and K * N delivered, it is
    -I * (l / mu - 1) / (K * N).
    """

    predicted: float
    """Bias by that identity, from the responses in flight at the end."""
    measured: float
    """Mean delivered length / mu - 1. The difference from `predicted` is due to the random choice
    of prompts, censoring, or drifting lengths."""
    mean: float
    """mu, in tokens."""
    reference: MeanReference
    """Source of mu: known beforehand, or estimated in this run."""
    predicted_by_batch: list[float]
    """Predicted bias after each batch, with the final lengths known or expected at the end."""
    measured_by_batch: list[float]
    """Measured bias of all responses delivered until each batch."""
    further_batches_to_1_percent: int
    """Number of further batches until the bias is at most 1 %, at the current concurrency."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CensoringFigures:
    """Whether drops select long responses."""

    policies: list[str]
    """Reasons of these drops, as in the ledger; empty if drops do not select long responses."""
    effect: float | None = None
    """Lower bound of the lasting bias of delivered lengths caused by these drops; None without."""
    warning: str | None = None
    """The finding and its remedy in one sentence; None without a finding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasFigures:
    """Over-representation of short responses: 0 without bias, -0.1 if 10 % too short."""

    first_batch_length_bias: float | None = None
    """Mean length of batch 0 / long-run mean - 1."""
    bias_estimate: float | None = figure(
        "Mean length of all delivered responses, relative to the reference mean, minus 1.",
        unit="share",
        headline="Length bias",
        better="zero",
    )
    bias_reference: BiasReference | None = None
    """Source of the reference mean: the workload if its mean is known, otherwise this run's batches
    after the burn-in."""
    workload_mean_length: float | None = None
    long_run_mean_length: float | None = None
    """Mean length in the batches after the burn-in."""
    delivered_mean_length: float | None = None
    delivered_mean_length_by_batch: list[float] = field(default_factory=list[float])
    drawn: LengthFigures | None = None
    """Lengths of all launched responses (Kaplan-Meier estimate); unfinished responses, in flight or
    dropped, are censored."""
    delivered: LengthFigures | None = None
    """Lengths of the delivered responses."""
    transient: TransientFigures | None = None
    dropped_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """Number of dropped tokens by reason, as in the ledger."""
    censoring: CensoringFigures = field(default_factory=lambda: CensoringFigures(policies=[]))


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferenceFigures:
    """The differences of some tokens, in nats; all but `tokens` are None without a token."""

    tokens: int
    mean: float | None
    """Mean of d. If negative, the tokens are less probable by the trainer than by the engine."""
    k3: float | None = figure(
        "Mean of exp(d) - 1 - d: an estimate of KL(engine, trainer) that is never negative "
        "(http://joschu.net/blog/kl-approx.html).",
        unit="nats",
        headline="Mismatch of engine and trainer",
        better="lower",
    )
    largest: float | None
    """The largest magnitude of d."""
    beyond_share: float | None
    """Share of the tokens whose magnitude of d is above `bound`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignmentFigures:
    """The trainer's log-probabilities against the engines', at staleness 0."""

    bound: float
    """Difference above which d counts as large, in nats."""
    whole: DifferenceFigures
    """All compared tokens."""
    skipped: int
    """Tokens that were not compared, because their version is uncertain or they attend to KV of
    older weights."""
    not_finite: int
    """Tokens with a log-probability that is NaN or infinite; anything but 0 indicates a bug."""
    by_engine: dict[str, DifferenceFigures]
    by_position: list[DifferenceFigures]
    """By position in the response, counted from 1: entry i is of the positions 2**i to
    2**(i + 1) - 1."""
    by_staleness: list[DifferenceFigures]
    """By staleness, over all tokens: entry 0 is the mismatch alone, and later entries also include
    the change of the policy. The last entry covers all older tokens."""
    by_batch: dict[int, DifferenceFigures]
    """By batch number, for the reported batches."""


SUMMARY_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary(Figures):
    """The content of summary.json. Its direct figures cover all batches together."""

    schema: int = SUMMARY_VERSION
    """Format version of this file; it increases when a field changes its meaning."""
    clock: Literal["virtual", "wall"]
    """"virtual": modelled seconds, on the embedded engine."""
    interrupted: bool
    """Whether Ctrl-C ended the run; the figures cover the time before."""
    error: str | None
    """Why the run ended early for another reason; None if it did not."""
    event_log_error: str | None
    """Why events.jsonl is incomplete; None if it is complete."""
    engines: int
    """Start of the run."""
    batches: int
    """Delivered."""
    rollouts: RolloutFigures
    tokens: TokenFigures
    seconds: SecondsFigures
    bias: BiasFigures
    steady_state: SteadyState
    alignment: AlignmentFigures | None = None
    """None unless the trainer reported its log-probabilities."""
    per_batch: list[BatchFigures] = field(default_factory=list[BatchFigures])

    @property
    def steady_steps_s(self) -> list[float]:
        """Seconds of each whole step after the burn-in."""
        return [batch.step_s for batch in self.per_batch[self.steady_state.burn_in :]]

    @property
    def step_efficiency(self) -> float | None:
        """T_bound over the seconds of whole steps after the burn-in; None without a step-time model
        or without such steps."""
        steady, whole = self.steady_state, sum(self.steady_steps_s)
        if steady.efficiency is None or steady.mean_batch_seconds is None or not whole:
            return None
        return steady.efficiency * steady.mean_batch_seconds * steady.batches / whole
