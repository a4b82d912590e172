"""events.jsonl: one line for every event and every command of a run.

Each line has ``t`` (seconds since the run began, on the run's clock), ``event`` or ``command``
with its name, and its fields. Nothing of the wall clock and nothing random is in it, so runs
under a virtual clock with the same seed write the same bytes.

A process that goes on with the run of a former one appends to its log: time goes on from the last
line, and the first new one is the event "Resumed".

Invariant: whatever goes wrong while writing, the run goes on; it is said once, and in the
summary. The disk is written to by a thread of its own: one that is too slow costs lines, which are
counted, and no time.
"""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from aprilsched.core.messages import commands as do
from aprilsched.core.messages.events import Event
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.base import Chunks
from aprilsched.telemetry.event_log.file_writer import FileWriter
from aprilsched.telemetry.event_log.frequent_lines import ProgressLine, progress_lines
from aprilsched.telemetry.event_log.lines import FIELDS, Lines
from aprilsched.telemetry.event_log.microseconds import to_microseconds
from aprilsched.telemetry.event_log.tail import RESUMED, Tail, read_tail
from aprilsched.telemetry.event_log.token_lines import TOKEN_FIELDS

__all__ = ["EventLog"]

log = logging.getLogger("aprilsched")

_FLUSH_SECONDS = 1.0
_LOOK_SECONDS = 0.25
"""Of the run's clock, which is at hand, between two looks at the wall clock."""
_FLUSH_BYTES = 1 << 18
_HOLD_LINES = 2048
"""Until they are encoded together, in 2 ms: one by one, between everything else that a coordinator
does, a line takes three times as long."""
_PENDING_BYTES = 1 << 26
"""What a disk that hangs may leave unwritten: some minutes of a busy fleet's lines."""
_CLOSE_SECONDS = 10.0
_NEW: Literal["xb", "wb"] = "xb"
_THERE: Literal["ab"] = "ab"

# A trainer may take minutes over a batch, and no event comes meanwhile to flush its delivery. What
# a caller gets may be changed by them, so it cannot be held.
_FLUSHED_AT_ONCE = frozenset({do.Deliver, do.DeliverEvaluation, do.Redeliver, do.FinishUpdate})


class EventLog:
    """Writes a run's events to `path`, which is made with the first bytes that reach it.

    With `append` it is there, of a run that was cut off. Nothing is written (or cut away) before
    :meth:`start`: a run that is refused leaves no file, or leaves it as it was. A `patient` log
    waits for a slow disk instead of dropping lines, as a run on a virtual clock should. Prompts and
    outputs are written with `log_tokens` only, else their lengths.
    """

    def __init__(
        self,
        path: Path,
        *,
        append: bool = False,
        patient: bool = False,
        log_tokens: bool = False,
    ) -> None:
        self._path = path
        self._lines = Lines(TOKEN_FIELDS if log_tokens else FIELDS)
        self._log_tokens = log_tokens
        self._hold_lines = 1 if log_tokens else _HOLD_LINES
        self._held: list[Event | do.Command | ProgressLine] = []
        """Not in the buffer yet, and after everything in it."""
        self._times: list[float] = []
        """When each of them was."""
        self._append = append
        self._tail: Tail | None = None
        """Where a former process's part ends; read with the first event of the new one."""
        self._encoder = msgspec.json.Encoder(enc_hook=_unknown)
        self._buffer = bytearray()
        self._in_buffer = 0
        """Lines."""
        self._dropped = 0
        self._failure: str | None = None
        self._began: float | None = None
        self._started = False
        self._flushed_at = time.monotonic()
        self._look_at = -math.inf
        """When, on the run's clock."""
        self._writer = FileWriter(
            path,
            _THERE if append else _NEW,
            max_bytes=_PENDING_BYTES,
            patient=patient,
            failed=self._give_up,
        )

    @property
    def error(self) -> str | None:
        """Why the log is not complete; None while it is."""
        if self._failure is None and self._dropped:
            return f"{self._dropped} lines were dropped, because the disk was too slow for them"
        return self._failure

    def on_event(self, event: Event, now: float) -> None:
        self._hold(event, now)

    def on_command(self, command: do.Command, now: float) -> None:
        self._hold(command, now)

    def on_progress(self, chunks: Chunks, now: float) -> None:
        self._held += [what for what, _ in chunks] if self._log_tokens else progress_lines(chunks)
        self._times += [at for _, at in chunks]
        if now >= self._look_at or len(self._held) >= self._hold_lines:
            self._look(now)

    def seconds(self, now: float) -> float:
        """`now`, of the event loop's clock, on the run's; 0.0 before the first event."""
        return 0.0 if self._began is None else to_microseconds(np.array([now - self._began]))[0]

    def start(self, *, batches: int = 0) -> None:
        """The folder is there: from now on lines reach the file. `batches`: delivered before, as
        a run that goes on knows it; what the log has beyond them was not saved, and is void."""
        self._started = True
        if self._append and self._failure is None:
            self._go_on(batches)
        self._flush()

    def _go_on(self, batches: int) -> None:
        try:
            tail = self._former()
            os.truncate(self._path, tail.size)
        except (OSError, RunFolderError) as error:
            self._give_up(error)
            return
        line = {"incarnation": tail.incarnation + 1, "batches": batches}
        line = {"t": tail.t, "event": RESUMED, **line}
        self._buffer[:0] = self._encoder.encode(line) + b"\n"

    def close(self) -> None:
        """Write what is left, in bounded time."""
        self._flush()
        if not self._writer.close(_CLOSE_SECONDS):
            self._give_up(TimeoutError(f"the disk did not take it within {_CLOSE_SECONDS:g} s"))

    def _hold(self, what: Event | do.Command, now: float) -> None:
        self._held.append(what)
        self._times.append(now)
        if what.__class__ in _FLUSHED_AT_ONCE:
            self._flush()
        elif now >= self._look_at or len(self._held) >= self._hold_lines:
            self._look(now)

    def _encode(self) -> None:
        """Bring what is held into the buffer."""
        held, self._held = self._held, []
        times, self._times = self._times, []
        if self._failure is not None or not held:
            return
        try:
            if self._began is None:
                self._began = times[0] - (self._former().t if self._append else 0.0)
            began = self._began
            seconds = to_microseconds(np.array(times) - began)
            self._buffer += self._encoder.encode_lines(self._lines.lines(held, seconds))
        except Exception as error:
            # Detached like any listener that raises, it could not say so in the summary.
            self._give_up(error)
        self._in_buffer += len(held)

    def _former(self) -> Tail:
        if self._tail is None:
            self._tail = read_tail(self._path)
        return self._tail

    def _look(self, now: float) -> None:
        """Flush if it is time to."""
        late = False
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            late = time.monotonic() - self._flushed_at > _FLUSH_SECONDS
        if len(self._held) >= self._hold_lines:
            self._encode()
        if late or len(self._buffer) > _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._encode()
        if not self._started or self._failure is not None or not self._buffer:
            return
        if not self._writer.put(bytes(self._buffer)):
            self._drop(self._in_buffer)
        self._buffer.clear()
        self._in_buffer = 0
        self._flushed_at = time.monotonic()

    def _drop(self, lines: int) -> None:
        if not self._dropped and self._failure is None:
            log.warning(
                "%s misses lines, the run goes on: the disk is too slow for them.", self._path.name
            )
        self._dropped += lines

    def _give_up(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = str(error)
            log.warning("%s is not complete, the run goes on: %s", self._path.name, error)


def _unknown(value: object) -> str:
    """Only the type of what JSON does not know: an array, say, may be token data."""
    return type(value).__name__
