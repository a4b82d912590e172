"""A worker thread that makes calls in order, behind a bounded queue, for what may be slow or hang.

The event log, the samples, the trackers and every listener in a
:class:`~aprilsched.observe.worker.QueuedListener` have one. The event loop is not involved, so a
virtual clock neither waits for a worker nor jumps because of it.

A ThreadPoolExecutor does not serve here: its queue has no bound, and the interpreter waits for its
threads at exit, so a disk that hangs would keep the process from ending.

Invariants:

- Who puts a call waits only if the worker is patient, and then only while the queue is full.
- Every call that was put is made, in order, or its size is counted in :attr:`Worker.dropped`.
- No call is made after one that raised, and none is begun after :meth:`Worker.close` has returned.
- A call that never returns holds up neither :meth:`Worker.close` nor the end of the process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Literal, Self, TypeVarTuple

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages.facts import Fact, TokensReceived
from aprilsched.kernel.shell.listener import Listener, TokenChunks
from aprilsched.kernel.values.files import open_private

log = logging.getLogger("aprilsched")

_Arguments = TypeVarTuple("_Arguments")


class Worker:
    """A queue and its thread, which starts with the first call.

    A process that is forked later has no such thread: whatever is put there is dropped.

    Args:
        name: who is called, for the program's log ("the listener ToDatabase").
        unit: what the sizes of calls count, in the plural ("facts", "bytes").
        max_pending: the largest total size of the calls that wait; the call that is being made
            does not count. A larger call is accepted when nothing else waits.
        close_seconds: how long :meth:`close` waits.
        patient: wait for a place in the queue, instead of dropping the call, as a run on a virtual
            clock should.
        failed: is told what a call raised, in the thread; by default it is logged with its
            traceback.
        at_end: is called in the thread after the last call, however it ended.

    Attributes:
        dropped: total size of the calls that will never be made.
        error: what a call raised; no more are made then.

    Raises:
        ConfigError: if `max_pending` is below 1, or `close_seconds` below 0.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        *,
        max_pending: int,
        close_seconds: float,
        patient: bool = False,
        failed: Callable[[BaseException], None] | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        if not max_pending >= 1:
            raise ConfigError(f"max_pending is {max_pending}; give 1 or more.")
        if not close_seconds >= 0:
            raise ConfigError(f"close_seconds is {close_seconds}; give 0 or more.")
        self.dropped = 0
        self.error: BaseException | None = None
        self._name = name
        self._unit = unit
        self._max_pending = max_pending
        self._close_seconds = close_seconds
        self._patient = patient
        self._failed = failed or self._log_failure
        self._at_end = at_end
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...], int]] = deque()
        self._pending = 0
        """Total size of the calls that wait."""
        self._changed = threading.Condition()
        self._closed = False
        self._said_full = self._told_error = False
        self._thread: threading.Thread | None = None
        self._process = 0
        """The process that has the thread."""

    def put(
        self, call: Callable[[*_Arguments], object], *arguments: *_Arguments, size: int = 1
    ) -> bool:
        """Make this call after all those before it.

        Returns:
            Whether it waits now; otherwise its size is counted as dropped.
        """
        if self._is_forked():
            # The thread that stayed behind may have held the lock at the fork.
            self.dropped += size
            if not self._said_full:
                self._said_full = True
                log.warning(
                    "%s has its thread in the process that this one was forked from, and misses "
                    "what comes here.",
                    self._name,
                )
            return False
        with self._changed:
            # A call that puts another one must not wait for itself.
            if self._patient and threading.current_thread() is not self._thread:
                while self._open and not self._fits(size):
                    self._changed.wait()
            full = self._open and not self._fits(size)
            if self._open and not full and (self._thread is not None or self._start()):
                if not self._calls:
                    self._changed.notify_all()  # the thread waits only while there are no calls
                self._calls.append((call, arguments, size))
                self._pending += size
                return True
            self.dropped += size
            say_full = full and not self._said_full
            self._said_full |= full
        if say_full:
            log.warning(
                "%s is too slow, and misses what comes while %d %s wait for it.",
                self._name,
                self._max_pending,
                self._unit,
            )
        self._tell_error()
        return False

    def close(self) -> bool:
        """Make the calls that wait, for a bounded time, and take no more.

        Returns:
            Whether the thread has ended in time. If not, a call hangs: the thread is left alone
            with it, and the calls after it are dropped.
        """
        if self._is_forked():
            return True
        with self._changed:
            first, self._closed = not self._closed, True
            self._changed.notify_all()
            if first and self._at_end is not None and self.error is None:
                self._start()
            thread = self._thread
        self._tell_error()
        if thread is None:
            return True
        if thread is threading.current_thread():
            return False
        thread.join(min(self._close_seconds, threading.TIMEOUT_MAX))
        with self._changed:
            in_time = not thread.is_alive()
            left = self._clear()
        if first and not in_time:
            log.warning(
                "%s was not done after %g s: it is left with what it has, and misses %d %s.",
                self._name,
                self._close_seconds,
                left,
                self._unit,
            )
        return in_time

    @property
    def _open(self) -> bool:
        return not self._closed and self.error is None

    def _fits(self, size: int) -> bool:
        return not self._calls or self._pending + size <= self._max_pending

    def _is_forked(self) -> bool:
        return self._thread is not None and self._process != os.getpid()

    def _start(self) -> bool:
        """Start the thread, unless it is there; returns whether it is. Called with the lock."""
        if self._thread is None:
            # A daemon, because a call that hangs must not keep the process from ending.
            thread = threading.Thread(target=self._work, name=f"to {self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # There is no room for another thread, or the interpreter is about to end.
                self.error = error
                return False
            self._process = os.getpid()
            self._thread = thread
        return True

    def _work(self) -> None:
        try:
            while (waiting := self._next()) is not None:
                call, arguments, _ = waiting
                call(*arguments)
                # What was passed on must not be kept while nothing comes.
                del waiting, call, arguments
        except BaseException as error:
            # SystemExit and CancelledError too: the queue would fill up in silence.
            self._end_with(error)
        try:
            if self._at_end is not None:
                self._at_end()
        except BaseException as error:
            self._end_with(error)

    def _next(self) -> tuple[Callable[..., object], tuple[Any, ...], int] | None:
        """The next call; None if there will be none."""
        with self._changed:
            while not self._calls and not self._closed:
                self._changed.wait()
            if not self._calls:
                return None
            waiting = self._calls.popleft()
            self._pending -= waiting[2]
            if self._patient:
                self._changed.notify_all()
            return waiting

    def _end_with(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._clear()
            self._changed.notify_all()
        self._tell_error()

    def _tell_error(self) -> None:
        """Tell what went wrong, once; without the lock, because a log may be slow."""
        if self.error is None:
            return
        with self._changed:
            first, self._told_error = not self._told_error, True
        if first:
            self._failed(self.error)

    def _clear(self) -> int:
        """Drop the calls that wait; returns their size."""
        left, self._pending = self._pending, 0
        self._calls.clear()
        self.dropped += left
        return left

    def _log_failure(self, error: BaseException) -> None:
        log.error(
            "%s raised and is told nothing more, the run goes on: %r",
            self._name,
            error,
            exc_info=error,
        )


# --- queued --------------------------------------------------------------------------------------

# Lets a listener be slow: it runs in a worker thread, behind a bounded queue.
#
# Invariants: the run never waits for it; what does not fit into the queue is dropped, counted and
# said once, and the rest arrives in order; the thread ends with :meth:`QueuedListener.close`, or
# with the process.

_CLOSE_SECONDS = 5.0


class QueuedListener:
    """Passes facts on to `listener`, later and in another thread.

    Use it as ``with QueuedListener(slow) as queued:`` around the scheduler that has it among its
    listeners. A `listener` that raises is told nothing more. A process that is forked from this
    one has no such thread, and tells the listener nothing.

    Args:
        listener: one that writes to a database, a web service or a slow disk, for example.
        kinds: the facts that the listener is told; None means all. Most facts are TokensReceived,
            so leaving them out saves most of the queue's time.
        max_pending: how many events may wait for the listener with their facts; what comes on top
            is dropped.
        close_seconds: how long the end of the block waits for what is pending.

    Raises:
        ConfigError: if `max_pending` is below 1, or `close_seconds` below 0.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        kinds: Collection[type] | None = None,
        max_pending: int = 100_000,
        close_seconds: float = _CLOSE_SECONDS,
    ) -> None:
        self._listener = listener
        self._kinds = None if kinds is None else frozenset(kinds)
        self._worker = Worker(
            f"the listener {type(listener).__qualname__}",
            "facts",
            max_pending=max_pending,
            close_seconds=close_seconds,
        )

    @property
    def dropped(self) -> int:
        """Number of events whose facts the listener was never told."""
        return self._worker.dropped

    @property
    def error(self) -> BaseException | None:
        """What the listener raised. It is told nothing more."""
        return self._worker.error

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        if self._kinds is not None:
            facts = [fact for fact in facts if fact.__class__ in self._kinds]
        if facts:
            self._worker.put(self._listener.on_facts, facts, now)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        if self._kinds is None or TokensReceived in self._kinds:
            for fact, at in chunks:
                self._worker.put(self._listener.on_facts, (fact,), at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Pass on what is pending, for a bounded time."""
        self._worker.close()


# --- file writer ---------------------------------------------------------------------------------

# Writes lines to a file in a worker thread, so that a disk that hangs holds nobody up.
#
# Invariants: what waits to be written is bounded; a block is written whole or not at all (an error
# of the disk excepted), in the order in which it was put; whatever goes wrong is said once in the
# log of the program, and :attr:`FileWriter.error` says what the file misses.


class FileWriter:
    """Writes to `path`, which is opened with the first block.

    Args:
        mode: how the file is opened.
        max_bytes: how much may wait to be written.
        close_seconds: how long :meth:`close` waits.
        patient: wait for a slow disk instead of dropping blocks, as on a virtual clock.
    """

    def __init__(
        self,
        path: Path,
        mode: Literal["xb", "ab", "wb"],
        *,
        max_bytes: int,
        close_seconds: float,
        patient: bool,
    ) -> None:
        self._path = path
        self._mode: Literal["xb", "ab", "wb"] = mode
        self._file: FileIO | None = None
        self._close_seconds = close_seconds
        self._failure: str | None = None
        self._dropped = 0
        """Lines that the queue had no room for."""
        self._accepted = self._written = 0
        """Lines."""
        self._worker = Worker(
            f"the disk of {path.name}",
            "bytes",
            max_pending=max_bytes,
            close_seconds=close_seconds,
            patient=patient,
            failed=self.fail,
            at_end=self._close_file,
        )

    @property
    def failed(self) -> bool:
        """Nothing is to be put any more."""
        return self._failure is not None

    @property
    def error(self) -> str | None:
        """Why the file is not complete; None while it is."""
        reasons = [] if self._failure is None else [self._failure]
        if self._dropped:
            reasons.append(
                f"{self._dropped} lines were dropped, because the disk was too slow for them"
            )
        return "; ".join(reasons) or None

    def fail(self, error: BaseException) -> None:
        """The file will not be complete because of `error`; what was put is written all the
        same."""
        if self._failure is None:
            self._failure = str(error) or repr(error)
            log.warning("%s is not complete, the run goes on: %s", self._path.name, self._failure)

    def put(self, block: bytes) -> None:
        """Write `block`, which consists of whole lines. The counts in :attr:`error` are exact if
        only one thread calls this."""
        lines = block.count(b"\n")
        if self._worker.put(self._write, block, lines, size=len(block)):
            self._accepted += lines
        elif self._worker.error is None:
            self._dropped += lines

    def close(self) -> None:
        """Write what is left, in bounded time."""
        if not self._worker.close() and self._failure is None:
            # The worker has said so in the log.
            self._failure = (
                f"the disk did not take {self._accepted - self._written} lines within "
                f"{self._close_seconds:g} s"
            )

    def _write(self, block: bytes, lines: int) -> None:
        if self._file is None:
            # Without a buffer: after an error there is nothing left that closing would write.
            self._file = FileIO(self._path, self._mode, opener=open_private)
        rest = memoryview(block)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._written += lines

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
