"""The data of a report: the figures, which the page also contains as JSON, and the history of the
run, which only its charts show.

Times are in seconds of the run's clock, and shares are between 0 and 1. An unknown figure is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.observe.figures.engine_time import Part
from aprilsched.observe.figures.faults import FaultLedger
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
    """Which values are better; None if neither direction is."""
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
class ReportData:
    """The figures of a run that a report shows."""

    schema: int = 1
    name: str
    """Name of the run folder."""
    version: str
    """Version of aprilsched that made the report."""
    warnings: list[str]
    """Reasons why the figures may not cover the whole run."""
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
        run: the history; its summary also contains the figures of single batches.
        gpu: share over time of each GPU, or of each engine by its own counters, as float64 [n]
            and float64 [n].
        gpu_label: the meaning of these shares; empty if the run was not sampled.
        letter: A or B if there are two runs; otherwise empty.
    """

    figures: ReportData
    run: Run
    usage: RunUsage
    gpu: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
    gpu_label: str
    letter: str = ""

    @property
    def summary(self) -> RunSummary:
        """Its figures, including single batches."""
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
        """Prefix of a sentence about it, or of the name of a line."""
        return f"{self.letter}: " if self.letter else ""

    @property
    def whose(self) -> str:
        """Possessive prefix of something that belongs to it."""
        return f"{self.letter}'s" if self.letter else "the"

    @property
    def suffix(self) -> str:
        """Suffix of its chart ids, which distinguishes them from the other run's ids."""
        return "-b" if self.letter == "B" else ""
