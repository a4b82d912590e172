"""Writes events.jsonl: one line for every fact of a run (:mod:`~.line_format`).

The log contains no wall-clock time and nothing random, so two runs under a virtual clock with the
same seed write the same bytes.

A process that resumes a run appends to its log. Its first line is a LogResumed, and its times
continue from the time of the last line.

Invariant: no write error stops the run; it is logged once and recorded in the summary. A separate
thread writes to the disk: a disk that is too slow costs lines, which are counted, but no time.
"""

from __future__ import annotations

import math
import time
from asyncio import CancelledError
from collections.abc import Sequence
from pathlib import Path
from traceback import format_exception_only
from typing import Literal, Self

import msgspec
import numpy as np

from aprilsched.errors import RunFolderError
from aprilsched.kernel.core.messages.facts import (
    BatchDelivered,
    EvaluationDelivered,
    Fact,
    RunOpened,
    UpdateFinished,
)
from aprilsched.kernel.shell.listener import TokenChunks
from aprilsched.kernel.values.files import PRIVATE_FOLDER, cut_off
from aprilsched.observe.file_writer import FileWriter
from aprilsched.observe.log.line_format import FORMAT_VERSION, LogBegun, LogEnded, LogResumed
from aprilsched.observe.log.tail import Tail, read_tail

_FLUSH_SECONDS = 1.0
_LOOK_SECONDS = 0.25
"""Seconds of the run's clock between two reads of the wall clock. Facts arrive with the time of the
run's clock, so comparing it costs nothing."""
_FLUSH_BYTES = 1 << 18
_HOLD_LINES = 2048
"""Number of lines that are buffered and then encoded together, in 2 ms. Encoding them one by one
between other work of the coordinator takes three times as long."""
_PENDING_BYTES = 1 << 26
"""Largest number of bytes pending on a hung disk: some minutes of a busy fleet's lines."""
_CLOSE_SECONDS = 10.0
_MAX_ERROR = 1000
"""Characters of an exception in the log."""
_NEW: Literal["xb", "wb"] = "xb"
_THERE: Literal["ab"] = "ab"

_DIGITS = 6
"""Decimals of a time in seconds, which is written in whole microseconds."""

# After these facts, no fact may follow for minutes while the trainer trains. So they are flushed
# at once.
_FLUSHED_AT_ONCE = frozenset({BatchDelivered, EvaluationDelivered, UpdateFinished})


class EventLog:
    """Writes a run's facts to the file at `path`.

    In a training loop use ``with EventLog(folder / "events.jsonl") as log:`` around the scheduler,
    and pass `log` in its `listeners`. The block creates the folder, and writes how the run ended.
    The log starts when the scheduler is open. :func:`~aprilsched.observe.log.run.read_run`,
    ``aprilsched report`` and ``watch`` read the folder.

    The file is not created or changed before that, so a refused run leaves no trace.

    Args:
        path: the file.
        append: continue the file if the run is resumed; otherwise the file must not exist.
        patient: wait for a slow disk instead of dropping lines, as a run on a virtual clock should.
        log_tokens: write the tokens of prompts and responses; otherwise only their number.
        waits: start only with :meth:`start`, and not when the scheduler opens.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        append: bool = False,
        patient: bool = False,
        log_tokens: bool = False,
        waits: bool = False,
    ) -> None:
        self._path = path = Path(path)
        self.wants_tokens = log_tokens
        """Whether its facts should contain the tokens, and not only their number."""
        self._held: list[Fact] = []
        """Facts that are not encoded yet. They follow everything in the buffer."""
        self._times: list[float] = []
        """Time of each fact in `_held`."""
        self._append = append
        self._tail: Tail | None = None
        """The end of the prior run's log. It is read when the first fact arrives."""
        # Sets are sorted: otherwise the bytes of a simulated run would differ between processes.
        self._encoder = msgspec.json.Encoder(enc_hook=_unknown, order="deterministic")
        self._buffer = bytearray()
        self._began: float | None = None
        self._last = 0.0
        """Time of the last fact on the run's clock."""
        self._started = False
        self._starts_itself = not waits
        """Whether the next RunOpened starts the log."""
        self._flushed_at = time.monotonic()
        self._look_at = -math.inf
        """Time on the run's clock of the next read of the wall clock."""
        self._writer = FileWriter(
            path,
            _THERE if append else _NEW,
            max_bytes=_PENDING_BYTES,
            close_seconds=_CLOSE_SECONDS,
            patient=patient,
        )

    def __enter__(self) -> Self:
        """Create the folder, and wait for the scheduler to open.

        Raises:
            RunFolderError: if the file exists and is not continued.
            OSError: if the folder cannot be created.
        """
        if not self._append and self._path.exists():
            raise RunFolderError(
                f"{self._path} must not exist; name another file, or continue the log of a resumed "
                "run with append=True."
            )
        self._path.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Write how the run ended, and close the file."""
        interrupted = isinstance(error, KeyboardInterrupt | CancelledError)
        text = None
        if error is not None and not interrupted:
            # Robust against exceptions whose str() fails. Lone surrogates have no JSON.
            text = "".join(format_exception_only(error)).strip()[:_MAX_ERROR]
            text = text.encode(errors="backslashreplace").decode()
        if self._started:
            self.on_facts([LogEnded(error=text, interrupted=interrupted)], self._last)
        self.close()

    @property
    def error(self) -> str | None:
        """Why the log is incomplete; None if it is complete."""
        return self._writer.error

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self._held += facts
        self._times += [now] * len(facts)
        self._last = now
        if self._starts_itself:
            self._start_with(facts)
        if any(fact.__class__ in _FLUSHED_AT_ONCE for fact in facts):
            self._flush()
        elif now >= self._look_at or len(self._held) >= _HOLD_LINES:
            self._look(now)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        self._held += [fact for fact, _ in chunks]
        self._times += [at for _, at in chunks]
        self._last = now
        if now >= self._look_at or len(self._held) >= _HOLD_LINES:
            self._look(now)

    def seconds(self, now: float) -> float:
        """Convert a time of the event loop's clock to seconds since the start of the run.

        Returns 0.0 before the first fact.
        """
        return 0.0 if self._began is None else float(np.round(now - self._began, _DIGITS))

    def start(self, *, batches: int = 0) -> None:
        """Start writing to the file; the run folder must exist.

        Args:
            batches: number of batches that a resumed run has saved. Later deliveries in the log
                were not saved, and are void.
        """
        self._started, self._starts_itself = True, False
        if self._append and not self._writer.failed:
            self._go_on(batches)
        elif not self._append:
            self._begin_with(LogBegun(version=FORMAT_VERSION), 0.0)
        self._flush()

    def _start_with(self, facts: Sequence[Fact]) -> None:
        """Start if the scheduler has opened."""
        for fact in facts:
            if isinstance(fact, RunOpened):
                if not self._path.exists():
                    self._append = False
                elif not fact.resumed:
                    self._writer.fail(RunFolderError("the file has another run; name a new one."))
                self.start(batches=fact.batches)

    def _go_on(self, batches: int) -> None:
        try:
            tail = self._prior_tail()
            cut_off(self._path, tail.size)
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
        """Write the remaining lines, in bounded time."""
        self._flush()
        self._writer.close()

    def _encode(self) -> None:
        """Encode the pending facts into the buffer."""
        held, self._held = self._held, []
        times, self._times = self._times, []
        if self._writer.failed or not held:
            return
        try:
            if self._began is None:
                self._began = times[0] - (self._prior_tail().t if self._append else 0.0)
            zero = self._began
            # Python's round() per value would take as long as the rest of the encoding.
            seconds = np.round(np.array(times) - zero, _DIGITS).tolist()
            self._buffer += self._as_lines(held, seconds)
        except Exception as error:
            # A listener that raises is detached. The log catches the error itself, so that the
            # summary reports an incomplete log.
            self._writer.fail(error)

    def _as_lines(self, facts: Sequence[Fact], seconds: Sequence[float]) -> bytes:
        """Encode each fact as a line, with its time before its own fields."""
        encoded = self._encoder.encode_lines(facts).split(b"\n")
        times = self._encoder.encode(seconds)[1:-1].split(b",")
        # The last element of `encoded`, after the last newline, is empty.
        lines = [b'{"t":%b,%b\n' % (t, line[1:]) for t, line in zip(times, encoded, strict=False)]
        return b"".join(lines)

    def _prior_tail(self) -> Tail:
        if self._tail is None:
            self._tail = read_tail(self._path)
        return self._tail

    def _look(self, now: float) -> None:
        """Flush if the last flush was long ago, or if the buffer is large."""
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
    """Return only the type of a value unknown to JSON, because an array may be token data."""
    return type(value).__name__
