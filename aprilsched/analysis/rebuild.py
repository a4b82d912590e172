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
from aprilsched.core.messages.facts import Fact
from aprilsched.telemetry.base import FactListener
from aprilsched.telemetry.event_log.version_1 import Protocol1
from aprilsched.telemetry.figures import RunSummary
from aprilsched.telemetry.run_folder import CONFIG, EVENTS, SUMMARY
from aprilsched.telemetry.run_state import RunState
from aprilsched.telemetry.summary import Remainder

__all__ = [
    "Rebuilding",
    "Teller",
    "rebuilt_summary",
    "remainder_of",
    "replay",
    "summary_of_run",
    "written_summary",
]

NOT_ENDED = "The run was cut off or goes on; the figures are those of its event log so far."


def replay(
    path: Path,
    listeners: Sequence[FactListener],
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
    teller.flush()
    return at


class Teller:
    """Shows `listeners` what lines say, one by one, and `readers` the lines themselves."""

    def __init__(
        self,
        listeners: Sequence[FactListener],
        *,
        readers: Sequence[Callable[[Line], None]] = (),
    ) -> None:
        self._listeners = tuple(listeners)
        self._readers = tuple(readers)
        self._as_line = msgspec.json.Decoder(Line)
        self._as_fields = msgspec.json.Decoder(dict[str, Any])
        self._protocol = Protocol1(self._show)

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
        if what is None:
            pass
        elif is_event:
            self._protocol.event(cast("Event", what), at)
        else:
            self._protocol.command(cast("Command", what), at)
        return at

    def flush(self) -> None:
        """There are no more lines for now."""
        self._protocol.flush()

    def _show(self, facts: Sequence[Fact], at: float) -> None:
        for listener in self._listeners:
            listener.on_facts(facts, at)


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
        self._basis, self._state = basis_of(config), RunState()
        self._summary = self._basis.summary()
        self._summary.ledger, self._summary.warns = self._state.ledger, False
        self.listeners: tuple[FactListener, ...] = (self._state, self._summary)

    def result(self) -> RunSummary:
        """Up to now."""
        return self._summary.result(
            remainder_of(self._state), clock=self._basis.clock, error=NOT_ENDED
        )


def remainder_of(state: RunState) -> Remainder:
    """What the scheduler would say of itself at the end."""
    return Remainder(
        in_flight=list(state.rollouts),
        counters=state.counters,
        ledger=state.ledger,
        open_groups=state.open_groups(),
    )
