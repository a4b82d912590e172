"""A run from its event log: its listeners fed once more, and summed up without its scheduler."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from aprilsched.analysis.basis import basis_of
from aprilsched.analysis.incarnations import whole_lines
from aprilsched.analysis.lines import PROGRESS, Line
from aprilsched.analysis.typed_lines import chunk, typed
from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.telemetry.base import Listener
from aprilsched.telemetry.books import Books
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import CONFIG, EVENTS, SUMMARY

__all__ = ["Rebuilding", "Teller", "rebuilt_summary", "replay", "summary_of_run", "written_summary"]

NOT_ENDED = "The run was cut off or goes on; the figures are those of its event log so far."


def replay(
    path: Path,
    listeners: Sequence[Listener],
    *,
    batches: int | None = None,
    readers: Sequence[Callable[[Line], None]] = (),
) -> float:
    """Show `listeners` what the log at `path` says; the time of its last line.

    `batches`: as many as a process knows of that goes on with the run and has not written yet.
    `readers` are shown each line as it is written, so that one pass over a long log is enough.

    Raises:
        OSError: if the file cannot be read.
        RunFolderError: if it is damaged before its end.
        ValueError, MsgspecError: if a line cannot be understood.
    """
    at = 0.0
    teller = Teller(listeners, readers=readers)
    for raw in whole_lines(path, batches=batches):
        at = teller.tell(raw)
    return at


class Teller:
    """Shows `listeners` what lines say, one by one, and `readers` the lines themselves."""

    def __init__(
        self, listeners: Sequence[Listener], *, readers: Sequence[Callable[[Line], None]] = ()
    ) -> None:
        self._listeners = tuple(listeners)
        self._readers = tuple(readers)
        self._as_line = msgspec.json.Decoder(Line)
        self._as_fields = msgspec.json.Decoder(dict[str, Any])

    def tell(self, raw: bytes) -> float:
        """The time of this line, which is shown.

        Raises:
            ValueError, MsgspecError: if it cannot be understood.
        """
        line = None
        if self._readers or PROGRESS in raw:
            line = self._as_line.decode(raw)
            for reader in self._readers:
                reader(line)
        # Two thirds of all lines, or more; they need no dictionary.
        if line is not None and line.event == "Progress":
            at, what, is_event = line.t, chunk(line.request_id, line.attempt, line.tokens), True
        else:
            fields = self._as_fields.decode(raw)
            try:
                at, is_event = fields["t"], "event" in fields
                what = typed(fields)
            except (KeyError, TypeError) as error:
                raise ValueError(f"a line of {EVENTS} lacks something: {error}") from error
        if what is not None:
            _show(self._listeners, what, at, is_event=is_event)
        return at


def summary_of_run(folder: Path) -> RunSummary:
    """The figures in summary.json, or rebuilt where the run did not come to writing it.

    Raises:
        OSError, ValueError, MsgspecError, RunFolderError: as for :func:`replay`.
    """
    return written_summary(folder) or rebuilt_summary(folder)


def written_summary(folder: Path) -> RunSummary | None:
    """The figures in summary.json; None where the run did not come to writing it.

    Raises:
        OSError, MsgspecError: if they cannot be read.
    """
    try:
        written = (folder / SUMMARY).read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(written, type=RunSummary)


def rebuilt_summary(folder: Path) -> RunSummary:
    """What the run's own summary would say now, from its configuration and its event log.

    Raises:
        OSError, ValueError, MsgspecError, RunFolderError: as for :func:`replay`.
    """
    config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    rebuilding = Rebuilding(config)
    replay(folder / EVENTS, rebuilding.listeners)
    return rebuilding.result()


class Rebuilding:
    """Sums up a run with this configuration, whose log is replayed for its `listeners`.

    Raises:
        ValueError: if the configuration is none.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._basis, self._books = basis_of(config), Books()
        self._summary = self._basis.summary()
        self._summary.ledger, self._summary.warns = self._books.ledger, False
        self.listeners: tuple[Listener, ...] = (self._books, self._summary)

    def result(self) -> RunSummary:
        """Up to now."""
        remainder = self._books.remainder()
        return self._summary.result(remainder, clock=self._basis.clock, error=NOT_ENDED)


def _show(
    listeners: Sequence[Listener], what: Event | Command, at: float, *, is_event: bool
) -> None:
    for listener in listeners:
        if is_event:
            listener.on_event(cast("Event", what), at)
        else:
            listener.on_command(cast("Command", what), at)
