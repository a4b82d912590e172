"""The data of a report. Charts, tables and JSON are made from it and from nothing else.

Times are in seconds of the run's clock, and shares are between 0 and 1. A figure that cannot be
known is None. Series are thinned to what a screen can show, so their size does not grow with the
run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from aprilsched.telemetry.engine_time import Part
from aprilsched.telemetry.figures import (
    AlignmentFigures,
    BiasFigures,
    Direction,
    ForecastFigures,
    Unit,
)
from aprilsched.telemetry.rollout_time import RolloutPart

MARKED = 20
"""Largest number of batches whose ends can be distinguished in a chart of the whole run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """A figure of the whole run."""

    key: str
    """The path of its field in summary.json."""
    label: str
    value: float | None
    text: str
    """The value with its unit, as text."""
    explanation: str
    """The meaning of the figure, in one line."""
    better: Direction | None = None
    """Which values are better; None if none are."""
    unit: Unit = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """A part of all engines' time; the parts add up to the whole time."""

    part: Part
    label: str
    seconds: float
    """Seconds of all engines together."""
    share: float
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTime:
    """Where the engines' time went."""

    engines: int
    batches: int
    wall: float
    utilization: float
    """Busy share of all engines' time."""
    parts: list[PartTime]
    stops: list[float]
    """Ends of equal pieces of the run, in seconds; the first piece begins at 0."""
    series: dict[str, list[float]]
    """For each part its share of all engines' time in each piece. Parts that are 0 are left out."""
    deliveries: list[float]
    """Times at which batches were delivered; thinned if there are very many."""
    by_engine: dict[str, float]
    """Busy share of each engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineEngine:
    """An engine in the close view: shares of its time in each piece, by part."""

    name: str
    utilization: float
    """Busy share of the engine in the window."""
    series: dict[str, list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseBar:
    """A response in the close view, as pieces of (start, end, policy version)."""

    pieces: list[tuple[float, float, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A close view of a few batches, by engine and by response."""

    start: float
    end: float
    first_batch: int
    """Number of the first batch, from 0."""
    last_batch: int
    stops: list[float]
    """Ends of equal pieces of the window, in seconds."""
    engines: list[TimelineEngine]
    engines_in_all: int
    deliveries: list[float]
    pauses: list[tuple[float, float]]
    """Times in which an engine was paused, as (start, end)."""
    responses: list[ResponseBar]
    responses_in_all: int
    """Number of responses in the window; those in `responses` are evenly thinned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCurve:
    """Shares of responses that are longer than each length, thinned; `mean` is the mean of all
    responses."""

    responses: int
    mean: float
    lengths: list[float]
    longer: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessLedger:
    """The staleness of what was delivered."""

    tokens_by_age: list[float]
    """Shares of the delivered tokens that are 0, 1, 2, … versions old. The last entry has all older
    tokens."""
    responses_by_versions: list[float]
    """Shares of the delivered responses that 1, 2, 3, … versions sampled. The last entry has all
    others."""
    batches: list[int]
    """First batch of each entry of `by_batch`, from 0."""
    by_batch: list[list[float]]
    """For each age and each batch (or several batches together) the share of their tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastLedger:
    """Forecasts of automatic scheduling and what happened, for each batch that had a forecast (of
    very many batches for some), and over those after the burn-in."""

    batches: list[int]
    """Numbers of the batches, from 0."""
    by_batch: list[ForecastFigures]
    steady: ForecastFigures | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLedger:
    """What the episodes and sessions of a run did."""

    seconds: dict[RolloutPart, float]
    """Mean seconds of a delivered rollout, by what it was at."""
    turns: float
    """Mean number of turns."""
    branches: int | None
    """Number of branches that sessions have begun; None without sessions."""
    drift: int | None
    """Number of their tokens that would be others if their chats were tokenised again."""
    ends: dict[str, int]
    """Number of rollouts by how they ended: "delivered", or the ledger's reason."""

    @property
    def shares(self) -> dict[RolloutPart, float]:
        """Shares of the rollouts' time."""
        whole = sum(self.seconds.values()) or 1.0
        return {part: spent / whole for part, spent in self.seconds.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultEvent:
    """An event of an engine."""

    time: float
    engine: str
    what: str
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Groups that were dropped for the same reason and cause."""

    reason: str
    cause: str
    groups: int
    rollouts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Attempts that failed for the same cause, whether they were repeated or given up."""

    cause: str
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultLedger:
    """What went wrong, and what was done about it. Lists have the most frequent or first entries;
    counts include all."""

    events: list[FaultEvent]
    events_in_all: int
    engines_lost: int
    engines_admitted: int
    resumed: int
    """Number of times that another process resumed the run."""
    failed_attempts: int
    retries: list[Retry]
    dropped_groups: int
    drops: list[Drop]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLine:
    """The samples of a GPU or an engine: percent over time."""

    name: str
    times: list[float]
    percent: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """Everything about a run that a report shows."""

    schema: int = 1
    name: str
    """Name of the run folder."""
    version: str
    """Version of aprilsched that made the report."""
    clock: Literal["virtual", "wall"]
    interrupted: bool
    warnings: list[str]
    """Reasons why the figures may not be those of a whole run."""
    ran: list[str]
    """The configuration, in sentences."""
    headlines: list[Headline]
    time: EngineTime
    timeline: Timeline
    lengths: dict[str, LengthCurve]
    """The known curves of "delivered", "drawn" (estimated with unfinished responses) and "first"
    (batch 0)."""
    staleness: StalenessLedger
    bias: BiasFigures
    faults: FaultLedger
    forecasts: ForecastLedger | None = None
    """None if no schedule was forecast."""
    episodes: EpisodeLedger | None = None
    """None if rollouts were single responses."""
    alignment: AlignmentFigures | None = None
    """None unless the trainer reported its log-probabilities."""
    gpu: list[GpuLine] = field(default_factory=list[GpuLine])
    gpu_label: str = ""
    """The meaning of the samples."""

    def headline(self, key: str) -> Headline:
        """The headline figure with this key."""
        return next(figure for figure in self.headlines if figure.key == key)
