"""``aprilsched watch RUN``: shows a run in another terminal, from the files that it writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from aprilsched.cli.arguments import POSITIONAL, parsed
from aprilsched.cli.runs.tables import run_table
from aprilsched.errors import RunFolderError
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.observe.figures.batch_figures import BatchMeter
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.live import LiveView, RunFacts, clock_time
from aprilsched.observe.log.basis import basis_of, batch_units_of
from aprilsched.observe.log.follow import Follower
from aprilsched.observe.log.reading import LogReader
from aprilsched.observe.log.rebuild import summary_of_run
from aprilsched.observe.log.run import readable
from aprilsched.observe.log.run_folder import CONFIG, EVENTS, SUMMARY, config_in
from aprilsched.observe.log.tail import log_end

_POLL_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class WatchCommand:
    """Show a run from its folder: a run in progress, about a second late, or a finished one."""

    run: Annotated[Path, POSITIONAL]
    """The run folder."""
    once: bool = False
    """Print the current state, and exit."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if the folder has no run, or if its files cannot be understood.
    """
    command = parsed(WatchCommand, arguments, "aprilsched watch")
    if not any((command.run / name).is_file() for name in (CONFIG, EVENTS)):
        raise RunFolderError(
            f"{command.run} has no run (it has no {EVENTS}); name the folder of a run that has "
            "started."
        )
    console = Console()
    with readable(command.run):
        if command.once:
            watched = Watched(command.run, console)
            watched.read()
            watched.view.note = ""
            console.print(watched.view.frame())
        else:
            _follow(command.run, console)
    return 0


def _follow(folder: Path, console: Console) -> None:
    watched = Watched(folder, console)
    with watched.view:
        # A run writes its summary, or the last line of its log, after everything else.
        while not (folder / SUMMARY).exists() and log_end(folder / EVENTS) is None:
            watched.read()
            time.sleep(_POLL_SECONDS)
        watched.read()
        watched.view.note = ""
    summary = summary_of_run(folder)
    outcome = "The run has ended"
    if summary.interrupted:
        outcome = "The run was ended by Ctrl-C"
    elif summary.error is not None:
        outcome = f"The run ended early: {summary.error}"
    console.print(run_table(summary))
    console.print(f"{outcome}; it is in {folder}", soft_wrap=True, highlight=False, markup=False)


_MAX_LINES = 10_000
"""Number of lines after which the view shows again how much of the log was read."""
_SILENT_SECONDS = 5.0
"""Seconds without a new line after which the view shows this. An active run writes every second."""
_LONG_SECONDS = 60.0
"""Seconds without a new line after which the view reports that the run waits or was killed."""


class Watched:
    """Reads the run in `folder` and keeps `view` up to date.

    Raises:
        OSError, ValueError: if the configuration cannot be read or understood.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder = folder
        self._follower = Follower(folder / EVENTS)
        self._read_at = time.monotonic()
        facts, self._meter, figures = self._configured()
        self.view = LiveView(console, facts, figures)
        self._reader = LogReader()

    def read(self) -> None:
        """Read the new lines of the log.

        Raises:
            OSError, ValueError, MsgspecError: if the log cannot be read or understood.
            RunFolderError: if the log is damaged.
        """
        while True:
            news = self._follower.poll(_MAX_LINES)
            if news.from_start:
                # A process that resumes the run may have other settings.
                facts, self._meter, figures = self._configured()
                self.view.restart(facts, figures)
                self._reader = LogReader()
            if not news.lines:
                break
            for raw in news.lines:
                self._show(self._reader.read(raw))
            self._show(self._reader.rest())
            self._read_at = time.monotonic()
            self.view.note = f"reading, {self._follower.caught_up:.0%}"
        silent = time.monotonic() - self._read_at
        self.view.note = f"no new lines for {clock_time(silent)}"
        if silent < _SILENT_SECONDS:
            self.view.note = ""
        elif silent >= _LONG_SECONDS:
            self.view.note += ": it waits, or was killed"

    def _show(self, parts: Sequence[tuple[Sequence[Fact], float]]) -> None:
        for facts, at in parts:
            for listener in (self._meter, *self.view.listeners):
                listener.on_facts(facts, at)

    def _configured(self) -> tuple[RunFacts, BatchMeter, LiveFigures]:
        config = config_in(self._folder)
        clock, summary = basis_of(config)
        units = batch_units_of(config)
        facts = RunFacts(
            title="run",
            where=str(self._folder),
            batches=config.get("batches", 0),
            batch_units=units or 0,
            modelled=clock == "virtual",
        )
        figures = LiveFigures(meter=summary.meter, batch_units=units, clock=None)
        return facts, summary.meter, figures
