"""What a report shows, as plain data: charts, tables and JSON are made from this and nothing else.

Times are in seconds of the run's clock, shares are of 1. A figure that cannot be known is None.
Series are thinned to what a screen can show, so the size does not grow with the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from aprilsched.telemetry.figures import BiasFigures
from aprilsched.telemetry.usage.parts import Part

__all__ = [
    "MARKED",
    "Drop",
    "EngineTime",
    "FaultEvent",
    "FaultLedger",
    "GpuLine",
    "Headline",
    "LengthCurve",
    "PartTime",
    "ReportData",
    "ResponseBar",
    "Retry",
    "StalenessLedger",
    "Timeline",
    "TimelineEngine",
]

MARKED = 20
"""Batches of which the ends can be told apart in a chart of the whole run."""
Direction = Literal["higher", "lower", "zero"]
"""Which values of a figure are better; "zero": the nearer to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """A figure of the whole run."""

    key: str
    label: str
    value: float | None
    text: str
    """The value with its unit, for people."""
    explanation: str
    """What it says, in one line."""
    better: Direction | None = None
    """None where neither is."""
    unit: Literal["share", "seconds", "count", "rate", "versions", "reward"] = "count"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """A part of all engines' time; all parts add up to all of it."""

    part: Part
    label: str
    seconds: float
    """Of all engines together."""
    share: float
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTime:
    """Where the engines' time went."""

    engines: int
    batches: int
    wall: float
    utilization: float
    """The busy share."""
    parts: list[PartTime]
    stops: list[float]
    """Ends of equal pieces of the run; the first begins at 0."""
    series: dict[str, list[float]]
    """By part, its share of all engines' time in each piece. Parts that are 0 are left out."""
    deliveries: list[float]
    """When batches were handed over; thinned where there are very many."""
    by_engine: dict[str, float]
    """The busy share of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineEngine:
    """An engine in the timeline's window: shares of its time, by part, in each piece."""

    name: str
    utilization: float
    """In the window."""
    series: dict[str, list[float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseBar:
    """A response: pieces of (start, end, policy version)."""

    pieces: list[tuple[float, float, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Some batches from near, by engine and by response."""

    start: float
    end: float
    first_batch: int
    """From 0."""
    last_batch: int
    stops: list[float]
    """Ends of equal pieces of the window."""
    engines: list[TimelineEngine]
    engines_in_all: int
    deliveries: list[float]
    pauses: list[tuple[float, float]]
    """In which some engine was paused."""
    responses: list[ResponseBar]
    responses_in_all: int
    """In the window; those shown are evenly thinned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCurve:
    """Shares of responses that are longer than a length, thinned; `mean` is that of all."""

    responses: int
    mean: float
    lengths: list[float]
    longer: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessLedger:
    """How old what the trainer got was."""

    tokens_by_age: list[float]
    """Shares of the delivered tokens that are 0, 1, 2, … versions old; the last entry is for all
    older ones."""
    responses_by_versions: list[float]
    """Shares of the delivered responses that 1, 2, 3, … versions sampled; the last likewise."""
    batches: list[int]
    """Those at which each entry of `by_batch` begins, from 0."""
    by_batch: list[list[float]]
    """By age, then by batch (or by some batches together): shares of their tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultEvent:
    """Something that happened to an engine."""

    time: float
    engine: str
    what: str
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Groups that were dropped for one reason and cause."""

    reason: str
    cause: str
    groups: int
    rollouts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Attempts that failed for one cause, and were made again or given up."""

    cause: str
    attempts: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultLedger:
    """What went wrong, and what was done about it. Lists hold what is most or first; the counts
    hold all."""

    events: list[FaultEvent]
    events_in_all: int
    engines_lost: int
    engines_admitted: int
    resumed: int
    """How often another process went on with the run."""
    failed_attempts: int
    retries: list[Retry]
    dropped_groups: int
    drops: list[Drop]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLine:
    """What a sampler said of a GPU or an engine: percent over time."""

    name: str
    times: list[float]
    percent: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportData:
    """Everything about a run that a report shows."""

    schema: int = 1
    name: str
    """Of the folder."""
    version: str
    """Of aprilsched that made the report."""
    clock: Literal["virtual", "wall"]
    interrupted: bool
    warnings: list[str]
    """Why the figures may not be those of a whole run."""
    ran: list[str]
    """The configuration, in sentences."""
    headlines: list[Headline]
    time: EngineTime
    timeline: Timeline
    lengths: dict[str, LengthCurve]
    """ "delivered", "drawn" (estimated with what never finished) and "first" (of batch 0); those
    that are known."""
    staleness: StalenessLedger
    bias: BiasFigures
    faults: FaultLedger
    gpu: list[GpuLine] = field(default_factory=list[GpuLine])
    gpu_label: str = ""
    """What the samples mean."""

    def headline(self, key: str) -> Headline:
        """The one of this name."""
        return next(figure for figure in self.headlines if figure.key == key)
