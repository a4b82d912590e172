"""What listens to a run, piece by piece and together."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from aprilsched.core.commands import Command
from aprilsched.core.events import Event
from aprilsched.telemetry.base import Listener
from aprilsched.telemetry.event_log import EventLog
from aprilsched.telemetry.progress import Progress
from aprilsched.telemetry.summary import Summary
from aprilsched.telemetry.usage.usage import Usage

__all__ = ["COMBINATIONS", "PIECES", "together"]

Piece: TypeAlias = Callable[[Path], AbstractContextManager[Listener]]
"""Listens while its block is open; files go into the folder."""


class Deaf:
    """What it costs to be told."""

    def on_event(self, event: Event, now: float) -> None:
        pass

    def on_command(self, command: Command, now: float) -> None:
        pass


@contextmanager
def deaf(_: Path) -> Iterator[Deaf]:
    yield Deaf()


@contextmanager
def event_log(folder: Path) -> Iterator[EventLog]:
    log = EventLog(folder / "events.jsonl")
    log.start()
    try:
        yield log
    finally:
        log.close()
    if log.error is not None:
        raise SystemExit(log.error)


@contextmanager
def summary(_: Path) -> Iterator[Summary]:
    yield Summary(trainer_waits=False)


@contextmanager
def usage(_: Path) -> Iterator[Usage]:
    yield Usage()


@contextmanager
def progress(_: Path) -> Iterator[Progress]:
    """As on a terminal."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress(console, title="run", batches=100, batch_groups=64, group_size=8) as shown:
        yield shown


PIECES: dict[str, Piece] = {
    "deaf": deaf,
    "event_log": event_log,
    "summary": summary,
    "usage": usage,
    "progress": progress,
}

COMBINATIONS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "log_and_summary": ("event_log", "summary"),
    "everything": tuple(name for name in PIECES if name != "deaf"),
    **{name: (name,) for name in PIECES},
}


@contextmanager
def together(names: Sequence[str], folder: Path) -> Generator[list[Listener]]:
    """These pieces at work."""
    with ExitStack() as stack:
        yield [stack.enter_context(PIECES[name](folder)) for name in names]
