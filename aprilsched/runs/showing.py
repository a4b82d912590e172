"""Chooses how a command shows a run in progress: as a live view or as plain lines."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console

from aprilsched.runs.setup import Setup
from aprilsched.telemetry.live.display import LiveView, PlainLines, can_draw
from aprilsched.telemetry.live.live_model import RunFacts
from aprilsched.telemetry.live_figures import LiveFigures
from aprilsched.telemetry.summary import Summary

__all__ = ["Screen", "Shown", "screen_of"]

Shown: TypeAlias = LiveView | PlainLines


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """Where and how a run will be shown; if `compact`, as one line that changes."""

    console: Console
    facts: RunFacts
    compact: bool = False

    def shown(self, summary: Summary, figures: LiveFigures | None = None) -> Shown:
        """The view of the run. `summary` must be an earlier listener of the run. Give `figures` if
        other listeners share them."""
        figures = figures or LiveFigures(
            meter=summary.meter,
            batch_groups=self.facts.batch_groups,
            clock=None if self.facts.modelled else time.monotonic,
        )
        if not can_draw(self.console):
            return PlainLines(self.console, self.facts, figures)
        return LiveView(self.console, self.facts, figures, compact=self.compact)


def screen_of(
    setup: Setup, console: Console, *, title: str, where: str = "", compact: bool = False
) -> Screen:
    """The screen for the run that `setup` describes."""
    facts = RunFacts(
        title=title,
        where=where,
        batches=setup.settings.batches,
        batch_groups=setup.config.batch_groups,
        modelled=setup.clock == "virtual",
    )
    return Screen(console=console, facts=facts, compact=compact)
