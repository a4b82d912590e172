"""What a report is made of: the figures, which are in the page as JSON too, and what happened when,
which only its charts show.

Times are in seconds of the run's clock, and shares are between 0 and 1. A figure that cannot be
known is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.observe.figures.engine_time import Part
from aprilsched.observe.figures.figures import Direction, Unit
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.log.run import Run
from aprilsched.observe.log.usage import RunUsage


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
    wall: float
    utilization: float
    """Busy share of all engines' time."""
    parts: list[PartTime]
    by_engine: dict[str, float]
    """Busy share of each engine."""


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
class ReportData:
    """The figures of a run that a report shows."""

    schema: int = 1
    name: str
    """Name of the run folder."""
    version: str
    """Version of aprilsched that made the report."""
    warnings: list[str]
    """Reasons why the figures may not be those of a whole run."""
    ran: list[str]
    """The configuration, in sentences."""
    headlines: list[Headline]
    time: EngineTime
    faults: FaultLedger
    summary: RunSummary
    """Without the figures of single batches, which are in summary.json."""

    def headline(self, key: str) -> Headline:
        """Return the headline figure with this key."""
        return next(figure for figure in self.headlines if figure.key == key)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunReport:
    """A run in a report.

    Attributes:
        run: what happened when; its summary has the figures of single batches too.
        gpu: share over time of each GPU, or of each engine by its own counters, as float64 [n]
            and float64 [n].
        gpu_label: the meaning of these shares; empty if the run was not sampled.
        letter: A or B where there are two runs; otherwise empty.
    """

    figures: ReportData
    run: Run
    usage: RunUsage
    gpu: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
    gpu_label: str
    letter: str = ""

    @property
    def summary(self) -> RunSummary:
        """Its figures, with those of single batches."""
        return self.run.summary

    @property
    def episodes(self) -> bool:
        """Whether its rollouts were episodes."""
        return self.summary.turns_mean is not None

    @property
    def label(self) -> str:
        """Its name, with its letter before it."""
        return f"{self.who}{self.figures.name}"

    @property
    def who(self) -> str:
        """What stands before a sentence about it, or before the name of a line."""
        return f"{self.letter}: " if self.letter else ""

    @property
    def whose(self) -> str:
        """What stands before something that it has."""
        return f"{self.letter}'s" if self.letter else "the"

    @property
    def suffix(self) -> str:
        """What distinguishes the ids of its charts from those of the other run."""
        return "-b" if self.letter == "B" else ""
