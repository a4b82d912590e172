"""Writes events.jsonl: one line for every fact of a run (:mod:`~.format`).

Nothing of the wall clock and nothing random is in it, so runs under a virtual clock with the same
seed write the same bytes.

A process that goes on with the run of a former one appends to its log: time goes on from the last
line, and the first new one is a LogResumed.

Invariant: whatever goes wrong while writing, the run goes on; it is said once, and in the
summary. The disk is written to by a thread of its own: one that is too slow costs lines, which are
counted, and no time.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from aprilsched.core.messages.facts import (
    BatchDelivered,
    EvaluationDelivered,
    Fact,
    UpdateFinished,
)
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.base import TokenChunks
from aprilsched.telemetry.event_log.format import FORMAT_VERSION, LogBegun, LogResumed
from aprilsched.telemetry.event_log.tail import Tail, read_tail
from aprilsched.telemetry.file_writer import FileWriter

__all__ = ["EventLog", "to_microseconds"]

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

_DIGITS = 6
_NEAR_TIE = 1e-3
_EXACT_BELOW = 1e6
"""Seconds: up to there the error of a product with a million is far smaller than `_NEAR_TIE`."""

# A trainer may take minutes over a batch, and no fact comes meanwhile to flush its delivery.
_FLUSHED_AT_ONCE = frozenset({BatchDelivered, EvaluationDelivered, UpdateFinished})


class EventLog:
    """Writes a run's facts to `path`, which is made with the first bytes that reach it.

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
        self.wants_tokens = log_tokens
        """The facts that it is told have the tokens themselves."""
        self._held: list[Fact] = []
        """Not in the buffer yet, and after everything in it."""
        self._times: list[float] = []
        """When each of them was."""
        self._append = append
        self._tail: Tail | None = None
        """Where a former process's part ends; read with the first event of the new one."""
        self._encoder = msgspec.json.Encoder(enc_hook=_unknown)
        self._buffer = bytearray()
        self._began: float | None = None
        self._started = False
        self._flushed_at = time.monotonic()
        self._look_at = -math.inf
        """When, on the run's clock."""
        self._writer = FileWriter(
            path,
            _THERE if append else _NEW,
            max_bytes=_PENDING_BYTES,
            close_seconds=_CLOSE_SECONDS,
            patient=patient,
        )

    @property
    def error(self) -> str | None:
        """Why the log is not complete; None while it is."""
        return self._writer.error

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self._held += facts
        self._times += [now] * len(facts)
        if any(fact.__class__ in _FLUSHED_AT_ONCE for fact in facts):
            self._flush()
        elif now >= self._look_at or len(self._held) >= _HOLD_LINES:
            self._look(now)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        self._held += [fact for fact, _ in chunks]
        self._times += [at for _, at in chunks]
        if now >= self._look_at or len(self._held) >= _HOLD_LINES:
            self._look(now)

    def seconds(self, now: float) -> float:
        """`now`, of the event loop's clock, on the run's; 0.0 before the first event."""
        return 0.0 if self._began is None else to_microseconds(np.array([now - self._began]))[0]

    def start(self, *, batches: int = 0) -> None:
        """The folder is there: from now on lines reach the file. `batches`: delivered before, as
        a run that goes on knows it; what the log has beyond them was not saved, and is void."""
        self._started = True
        if self._append and not self._writer.failed:
            self._go_on(batches)
        elif not self._append:
            self._begin_with(LogBegun(version=FORMAT_VERSION), 0.0)
        self._flush()

    def _go_on(self, batches: int) -> None:
        try:
            tail = self._prior_tail()
            os.truncate(self._path, tail.size)
        except (OSError, RunFolderError) as error:
            self._writer.fail(error)
            return
        resumed = LogResumed(
            version=FORMAT_VERSION, incarnation=tail.incarnation + 1, batches=batches
        )
        self._begin_with(resumed, tail.t)

    def _begin_with(self, fact: Fact, t: float) -> None:
        self._buffer[:0] = self._as_lines([fact], [t])

    def close(self) -> None:
        """Write what is left, in bounded time."""
        self._flush()
        self._writer.close()

    def _encode(self) -> None:
        """Bring what is held into the buffer."""
        held, self._held = self._held, []
        times, self._times = self._times, []
        if self._writer.failed or not held:
            return
        try:
            if self._began is None:
                self._began = times[0] - (self._prior_tail().t if self._append else 0.0)
            began = self._began
            seconds = to_microseconds(np.array(times) - began)
            self._buffer += self._as_lines(held, seconds)
        except Exception as error:
            # Detached like any listener that raises, it could not say so in the summary.
            self._writer.fail(error)

    def _as_lines(self, facts: Sequence[Fact], seconds: Sequence[float]) -> bytes:
        """Each fact with its time before its own fields."""
        encoded = self._encoder.encode_lines(facts).split(b"\n")
        times = self._encoder.encode(seconds)[1:-1].split(b",")
        # The last of what was encoded is what follows the last line: nothing.
        lines = [b'{"t":%b,%b\n' % (t, line[1:]) for t, line in zip(times, encoded, strict=False)]
        return b"".join(lines)

    def _prior_tail(self) -> Tail:
        if self._tail is None:
            self._tail = read_tail(self._path)
        return self._tail

    def _look(self, now: float) -> None:
        """Flush if it is time to."""
        late = False
        if now >= self._look_at:
            self._look_at = now + _LOOK_SECONDS
            late = time.monotonic() - self._flushed_at > _FLUSH_SECONDS
        if len(self._held) >= _HOLD_LINES:
            self._encode()
        if late or len(self._buffer) > _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._encode()
        if not self._started or self._writer.failed or not self._buffer:
            return
        self._writer.put(bytes(self._buffer))
        self._buffer.clear()
        self._flushed_at = time.monotonic()


def _unknown(value: object) -> str:
    """Only the type of what JSON does not know: an array, say, may be token data."""
    return type(value).__name__


def to_microseconds(seconds: NDArray[np.float64]) -> list[float]:
    """``round(s, 6)`` of each of `seconds`, to the last bit, in a tenth of the time.

    Rounding one by one took as long as everything else that a line needs. Only values that may be
    ties are left to ``round``.
    """
    micro = seconds * 10**_DIGITS
    whole = np.rint(micro)
    rounded: list[float] = (whole / 10**_DIGITS).tolist()
    doubtful = np.abs(micro - whole) > 0.5 - _NEAR_TIE
    doubtful |= np.abs(micro) > _EXACT_BELOW * 10**_DIGITS
    for index in np.flatnonzero(doubtful).tolist():
        rounded[index] = round(float(seconds[index]), _DIGITS)
    return rounded
