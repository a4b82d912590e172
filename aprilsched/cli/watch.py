"""``aprilsched watch RUN``: shows a run in another terminal, from the files that it writes."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from rich.console import Console
from rich.text import Text

from aprilsched.analysis.rebuild import basis_of, summary_of_run
from aprilsched.analysis.run import readable
from aprilsched.cli.arguments import POSITIONAL, parsed
from aprilsched.core.messages.facts import Fact
from aprilsched.errors import RunFolderError
from aprilsched.files import read_text
from aprilsched.runs.showing import run_table
from aprilsched.telemetry.base import Listener
from aprilsched.telemetry.batch_figures import BatchMeter
from aprilsched.telemetry.event_log.reading import Follower, LogReader
from aprilsched.telemetry.live.live_model import RunFacts
from aprilsched.telemetry.live.view import LiveView, PlainLines, can_draw, clock_time
from aprilsched.telemetry.live_figures import LiveFigures
from aprilsched.telemetry.run_folder import CONFIG, EVENTS, SUMMARY

_POLL_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class WatchCommand:
    """Show a run from its folder, as its own terminal does: a run in progress, about a second late,
    or a run that has ended."""

    run: Annotated[Path, POSITIONAL]
    """The run folder."""
    once: bool = False
    """Print the current state, and end."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        AprilschedError: if the folder has no run, or if its files cannot be understood.
    """
    command = parsed(WatchCommand, arguments, "aprilsched watch")
    if not (command.run / CONFIG).is_file():
        raise RunFolderError(
            f"{command.run} has no run (it has no {CONFIG}); name the folder of a run that has "
            "begun."
        )
    console = Console()
    with readable(command.run):
        if command.once:
            _once(command.run, console)
        else:
            _follow(command.run, console)
    return 0


def _once(folder: Path, console: Console) -> None:
    watched = Watched(folder, console, draws=True)
    while watched.read():
        pass
    console.print(watched.last_frame())


def _follow(folder: Path, console: Console) -> None:
    watched = Watched(folder, console, draws=can_draw(console))
    with watched:
        ended = False
        while not ended:
            # Checked before the last read: a run writes its summary after everything else.
            ended = watched.ended
            while watched.read():
                pass
            if not ended:
                time.sleep(_POLL_SECONDS)
    if watched.draws:
        console.print(watched.last_frame())
    summary = summary_of_run(folder)
    said = "The run has ended"
    if summary.interrupted:
        said = "The run was ended by Ctrl-C"
    elif summary.error is not None:
        said = f"The run ended early: {summary.error}"
    console.print(run_table(summary))
    console.print(f"{said}; it is in {folder}", soft_wrap=True, highlight=False, markup=False)


_LINES = 10_000
"""Number of lines after which the view shows again how far the reading has come."""
_SILENT_SECONDS = 5.0
"""Seconds without a new line after which the view says so. A run writes each second while something
happens."""
_LONG_SECONDS = 60.0
"""Seconds without a new line after which the view says that the run waits or was killed."""


class Watched:
    """Reads the run in `folder` and shows it; use it as ``with watched:`` to draw the view.

    Attributes:
        draws: whether a view is drawn; otherwise one line is printed for each batch.
        view: the view; None if none is drawn.

    Raises:
        OSError, ValueError: if the configuration cannot be read or understood.
    """

    def __init__(self, folder: Path, console: Console, *, draws: bool) -> None:
        self.draws = draws
        self._folder = folder
        self._console = console
        self._follower = Follower(folder / EVENTS)
        self._heard_at = time.monotonic()
        self.view: LiveView | None = None
        self._plain: PlainLines | None = None
        self._listeners, self._reader = self._begin(), LogReader()
        self._reader = LogReader()

    @property
    def ended(self) -> bool:
        """Whether the run has ended. Its summary is then there, and so is everything else."""
        return (self._folder / SUMMARY).exists()

    def __enter__(self) -> Self:
        if self.view is not None:
            self.view.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.view is not None:
            self.view.__exit__(*exception)

    def read(self) -> bool:
        """Show new lines of the log; returns whether there were any.

        Raises:
            OSError, ValueError, MsgspecError: if the log cannot be read or understood.
            RunFolderError: if the log is damaged.
        """
        news = self._follower.poll(_LINES)
        if news.from_start:
            self._listeners, self._reader = self._begin(), LogReader()
        for raw in news.lines:
            self._show(self._reader.read(raw))
        if news.lines:
            self._show(self._reader.rest())
        now = time.monotonic()
        if news.lines:
            self._heard_at = now
        self._note(now - self._heard_at)
        return bool(news.lines)

    def _show(self, parts: Sequence[tuple[Sequence[Fact], float]]) -> None:
        for facts, at in parts:
            for listener in self._listeners:
                listener.on_facts(facts, at)

    def last_frame(self) -> Text:
        """The view as it is now; if the output is not a terminal, in full height."""
        assert self.view is not None  # noqa: S101 - only called when a view is drawn
        self.view.model.note = ""
        return self.view.frame(whole=not self._console.is_terminal)

    def _begin(self) -> Sequence[Listener]:
        """The listeners that get the log from its first line. They are made again when a process
        resumes the run, because it may have other settings."""
        config: dict[str, Any] = tomllib.loads(read_text(self._folder / CONFIG))
        basis = basis_of(config)
        facts = RunFacts(
            title="run",
            where=str(self._folder),
            batches=config["batches"],
            batch_groups=config["scheduler"]["batch_groups"],
            modelled=basis.clock == "virtual",
        )
        meter = BatchMeter(trainer_waits=basis.trainer_waits, bound=basis.bound)
        figures = LiveFigures(meter=meter, batch_groups=facts.batch_groups, clock=None)
        if not self.draws:
            said = 0 if self._plain is None else self._plain.said
            self._plain = PlainLines(self._console, facts, figures, said=said)
            return (meter, *self._plain.listeners)
        if self.view is None:
            self.view = LiveView(self._console, facts, figures)
        else:
            self.view.restart(facts, figures)
        return (meter, *self.view.listeners)

    def _note(self, silent: float) -> None:
        if self.view is None:
            return
        note = ""
        if self._follower.caught_up < 1.0:
            note = f"reading, {self._follower.caught_up:.0%}"
        elif silent >= _SILENT_SECONDS:
            note = f"no new lines for {clock_time(silent)}"
            if silent >= _LONG_SECONDS:
                note += ": it waits, or was killed"
        self.view.model.note = note
