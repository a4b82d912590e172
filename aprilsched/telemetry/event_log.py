"""events.jsonl: one line for every event and every command of a run.

Each line has ``t`` (seconds since the run began, on the run's clock), ``event`` or ``command``
with its name, and its fields. Nothing of the wall clock and nothing random is in it, so runs
under a virtual clock with the same seed write the same bytes.

Invariant: whatever goes wrong while writing, the run goes on; it is said once, and in the
summary.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from aprilsched.core import commands as do
from aprilsched.core.events import Event
from aprilsched.telemetry.event_lines import plain_fields

__all__ = ["EventLog"]

log = logging.getLogger("aprilsched")

_FLUSH_SECONDS = 1.0
_FLUSH_BYTES = 1 << 18
_MICROSECONDS = 6
_NEW = "xb"

# A trainer may take minutes over a batch, and no event comes meanwhile to flush its delivery.
_FLUSHED_AT_ONCE = (do.Deliver, do.FinishUpdate)


class EventLog:
    """Writes a run's events to `path`, which is made with the first bytes that reach it.

    Nothing is written before :meth:`start`: a run that is refused leaves no file.
    """

    def __init__(self, path: Path) -> None:
        self.error: str | None = None
        """Why the log is not complete; None while it is."""
        self._path = path
        self._file: BinaryIO | None = None
        self._encoder = msgspec.json.Encoder(enc_hook=_unknown)
        self._buffer = bytearray()
        self._began: float | None = None
        self._started = False
        self._flushed_at = time.monotonic()

    def on_event(self, event: Event, now: float) -> None:
        self._line("event", event, now)

    def on_command(self, command: do.Command, now: float) -> None:
        self._line("command", command, now)

    def start(self) -> None:
        """The folder is there: from now on lines reach the file."""
        self._started = True

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)
            self._file = None

    def _line(self, kind: str, what: object, now: float) -> None:
        if self.error is not None:
            return
        if self._began is None:
            self._began = now
        line = {"t": round(now - self._began, _MICROSECONDS), kind: type(what).__name__}
        try:
            line.update(plain_fields(what))
            self._buffer += self._encoder.encode(line)
        except Exception as error:
            # A listener that raises ends the run, and a log is no reason to.
            self._give_up(error)
            return
        self._buffer += b"\n"
        if self._due() or isinstance(what, _FLUSHED_AT_ONCE):
            self._flush()

    def _due(self) -> bool:
        late = time.monotonic() - self._flushed_at > _FLUSH_SECONDS
        return late or len(self._buffer) > _FLUSH_BYTES

    def _flush(self) -> None:
        if not self._started or self.error is not None or not self._buffer:
            return
        try:
            if self._file is None:
                self._file = self._path.open(_NEW)
            self._file.write(self._buffer)
            self._file.flush()
        except OSError as error:
            self._give_up(error)
        self._buffer.clear()
        self._flushed_at = time.monotonic()

    def _give_up(self, error: Exception) -> None:
        if self.error is None:
            self.error = str(error)
            self._buffer.clear()
            log.warning("%s is not complete, the run goes on: %s", self._path.name, error)


def _unknown(value: object) -> str:
    """Only the type of what JSON does not know: an array, say, may be token data."""
    return type(value).__name__
