"""``aprilsched watch RUN``: look at a run from another terminal, by what it writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from aprilsched.analysis.rebuild import summary_of_run
from aprilsched.analysis.run import readable
from aprilsched.commands.tables import run_table
from aprilsched.commands.watched import Watched
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.live.display import can_draw
from aprilsched.telemetry.run_folder import CONFIG

__all__ = ["WatchCommand", "main"]

_POLL_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class WatchCommand:
    """Show a run as its own terminal does, from its folder: one that goes on, about a second late,
    or one that has ended."""

    run: tyro.conf.Positional[Path]
    """The run folder."""
    once: bool = False
    """Print what is to be seen now, and end."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code.

    Raises:
        AprilschedError: if the folder holds no run, or one that cannot be understood.
    """
    command = tyro.cli(
        WatchCommand,
        args=list(arguments),
        prog="aprilsched watch",
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    if not (command.run / CONFIG).is_file():
        raise RunFolderError(
            f"{command.run} holds no run (it has no {CONFIG}); name the folder of one that has "
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
            # Before the last look: what a run writes it has written when its summary is there.
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
