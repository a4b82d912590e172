"""The display of a command: a live view during a run, and pictures and tables at its end."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console

from aprilsched.cli.runs.setup import Setup
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.live import LiveView, RunFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """Where a run is shown."""

    console: Console
    facts: RunFacts

    def shown(self, figures: LiveFigures) -> LiveView:
        """Return the view of the run with these figures."""
        return LiveView(self.console, self.facts, figures)


def screen_of(setup: Setup, console: Console, *, title: str, where: str = "") -> Screen:
    """Return the screen for the run that `setup` describes."""
    facts = RunFacts(
        title=title,
        where=where,
        batches=setup.settings.batches,
        batch_units=setup.config.batch_units,
        modelled=setup.clock == "virtual",
    )
    return Screen(console=console, facts=facts)
