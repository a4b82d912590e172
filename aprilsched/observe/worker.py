"""A worker thread with a bounded queue, for calls that may be slow or hang.

The event log, the samples, the trackers and every
:class:`~aprilsched.observe.queued.QueuedListener` use one. The event loop is not involved, so a
virtual clock neither waits for a worker nor jumps because of it.

A ThreadPoolExecutor does not work here: its queue is unbounded, and the interpreter joins its
threads at exit, so a hung disk would keep the process from exiting.

Invariants:

- The caller of `put` waits only if the worker is patient, and only while the queue is full.
- Every call in the queue is made, in order, or its size is counted in :attr:`Worker.dropped`.
- No call is made after one that raised, and none starts after :meth:`Worker.close` has returned.
- A call that never returns blocks neither :meth:`Worker.close` nor the exit of the process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Self, TypeVarTuple

from aprilsched.errors import ConfigError

log = logging.getLogger("aprilsched")

_Arguments = TypeVarTuple("_Arguments")


class Worker:
    """A queue and its thread, which starts with the first call.

    A process forked later does not have the thread, and drops every call.

    Args:
        name: the callee, for log messages ("the listener ToDatabase").
        unit: unit of the sizes of calls, in the plural ("facts", "bytes").
        max_pending: largest total size of the pending calls; the running call does not count. A
            larger call is accepted if nothing else is pending.
        close_seconds: how long :meth:`close` waits.
        patient: wait for room in the queue instead of dropping the call, as a run on a virtual
            clock should.
        failed: receives the error of a call, in the thread; by default the error is logged with
            its traceback.
        at_end: called in the thread after the last call, whether or not it raised.

    Attributes:
        dropped: total size of the calls that will never be made.
        error: the error that a call raised, after which no call is made; None if none.

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
        """Total size of the pending calls."""
        self._changed = threading.Condition()
        self._closed = False
        self._said_full = self._told_error = False
        self._thread: threading.Thread | None = None
        self._process = 0
        """Id of the process that owns the thread."""

    def put(
        self, call: Callable[[*_Arguments], object], *arguments: *_Arguments, size: int = 1
    ) -> bool:
        """Queue a call after all earlier calls.

        Returns:
            Whether the call is queued; otherwise its size is counted as dropped.
        """
        if self._is_forked():
            # The parent's thread may have held the lock at the fork.
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
                    self._changed.notify_all()  # the thread waits only while the queue is empty
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
        """Make the pending calls, for a bounded time, and accept no more.

        Returns:
            Whether the thread ended in time. If not, a call hangs: the thread is abandoned, and the
            calls after it are dropped.
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
        """Start the thread unless it exists; return whether it does. The lock must be held."""
        if self._thread is None:
            # A daemon, because a hung call must not keep the process from exiting.
            thread = threading.Thread(target=self._work, name=f"to {self._name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # The thread limit is reached, or the interpreter is shutting down.
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
                # Release the arguments of the last call while the queue is empty.
                del waiting, call, arguments
        except BaseException as error:
            # SystemExit and CancelledError too; otherwise the queue would fill up silently.
            self._end_with(error)
        try:
            if self._at_end is not None:
                self._at_end()
        except BaseException as error:
            self._end_with(error)

    def _next(self) -> tuple[Callable[..., object], tuple[Any, ...], int] | None:
        """Return the next call, or None after the last one."""
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
        """Report the error, once; without the lock, because logging may be slow."""
        if self.error is None:
            return
        with self._changed:
            first, self._told_error = not self._told_error, True
        if first:
            self._failed(self.error)

    def _clear(self) -> int:
        """Drop the pending calls, and return their size."""
        left, self._pending = self._pending, 0
        self._calls.clear()
        self.dropped += left
        return left

    def _log_failure(self, error: BaseException) -> None:
        log.error(
            "%s raised and is left out from now on, the run continues: %r",
            self._name,
            error,
            exc_info=error,
        )


class HasWorker:
    """A listener whose calls a worker makes; use it as ``with listener:``."""

    _worker: Worker

    @property
    def error(self) -> BaseException | None:
        """The error of a call, after which none is made; None if none."""
        return self._worker.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Make the pending calls, and what comes at the end, in bounded time."""
        self._worker.close()
