"""Chooses how a command shows a run in progress: as a live view or as plain lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from aprilsched.analysis.run import read_run
from aprilsched.errors import AprilschedError, MissingExtra
from aprilsched.runs.setup import Setup
from aprilsched.telemetry.live.display import LiveView, PlainLines, can_draw
from aprilsched.telemetry.live.live_model import RunFacts
from aprilsched.telemetry.live_figures import LiveFigures

Shown: TypeAlias = LiveView | PlainLines


@dataclass(frozen=True, kw_only=True, slots=True)
class Screen:
    """Where and how a run will be shown; if `compact`, as one line that changes."""

    console: Console
    facts: RunFacts
    compact: bool = False

    def shown(self, figures: LiveFigures) -> Shown:
        """The view of the run with these figures."""
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


# --- pictures ------------------------------------------------------------------------------------

# Writes the pictures, reports and traces that a command leaves in its folders.
#
# Invariant: if one of them cannot be made, the command says so in one line and continues, because
# the run itself is complete.


def draw_comparison(
    root: Path, folders: Mapping[str, str], messages: Console, *, each: bool = True
) -> None:
    """Draw comparison.png in `root`.

    With `each`, also draw timeline.png, lengths.png and bias.png in the folder of each policy,
    which takes about two seconds for each policy.
    """
    try:
        from aprilsched.analysis import plots
    except MissingExtra as error:
        messages.print(f"No pictures: {error}", soft_wrap=True, highlight=False, markup=False)
        return
    runs = {name: read_run(root / folder) for name, folder in folders.items()}
    plots.save(plots.comparison(runs), root / "comparison.png")
    if not each:
        return
    for name, run in runs.items():
        folder = root / folders[name]
        plots.save(plots.timeline(run, title=name), folder / "timeline.png")
        plots.save(plots.lengths(run, title=name), folder / "lengths.png")
        plots.save(plots.bias(run, title=name), folder / "bias.png")


def leave_report(
    messages: Console, folder: Path, other: Path | None = None, *, out: Path | None = None
) -> None:
    """Write the report of the run in `folder`, with the run `other` side by side if it is given,
    and print its path."""

    def make() -> None:
        from aprilsched.analysis.report.page import write_report

        path, _ = write_report(folder, other, out=out)
        messages.print(f"The report is in {path}", soft_wrap=True, highlight=False)

    _attempt("report", make, messages)


def leave_trace(messages: Console, folder: Path) -> None:
    """Write the trace of the run in `folder` for Perfetto, and print its path."""

    def make() -> None:
        from aprilsched.analysis.trace import write_trace

        path = write_trace(folder)
        messages.print(f"The trace is in {path}", soft_wrap=True, highlight=False)

    _attempt("trace", make, messages)


def _attempt(what: str, make: Callable[[], None], messages: Console) -> None:
    try:
        make()
    except AprilschedError as error:
        messages.print(f"No {what}: {error}", soft_wrap=True, highlight=False, markup=False)
    except Exception as error:
        text = f"No {what}: {type(error).__name__}: {error}"
        messages.print(text, soft_wrap=True, highlight=False, markup=False)
