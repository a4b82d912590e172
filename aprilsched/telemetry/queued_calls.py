"""Calls that are made later, in a thread of their own, behind a queue that has an end.

Invariants: whoever puts a call never waits; what did not fit is dropped, counted and said once, the
rest is called in order; the thread ends with :meth:`QueuedCalls.close`, or with the process.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from aprilsched.errors import ConfigError

__all__ = ["QueuedCalls"]

log = logging.getLogger("aprilsched")


class QueuedCalls:
    """A queue and its thread. After a call that raised nothing more is called.

    Args:
        name: of whom is called, for the log ("the listener ToDatabase").
        what: is passed on, in the plural ("events and commands").
        max_pending: calls that wait at most; what comes on top is dropped.
        close_seconds: that :meth:`close` waits for what is pending.

    Raises:
        ConfigError: if a number is below its least.
    """

    def __init__(self, name: str, what: str, *, max_pending: int, close_seconds: float) -> None:
        if max_pending < 1:
            raise ConfigError(f"max_pending is {max_pending}; give 1 or more.")
        if close_seconds < 0:
            raise ConfigError(f"close_seconds is {close_seconds}; give 0 or more.")
        self.dropped = 0
        """Calls that were never made."""
        self.error: Exception | None = None
        """What a call raised; no more are made."""
        self._name = name
        self._what = what
        self._max_pending = max_pending
        self._close_seconds = close_seconds
        self._pending: deque[tuple[Callable[[Any, Any], None], Any, Any]] = deque()
        self._ready = threading.Condition()
        self._closed = False
        # A daemon: one that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"to {name}", daemon=True)
        self._thread.start()

    def put(self, call: Callable[[Any, Any], None], first: Any, second: Any) -> None:
        """Make this call after all those before it."""
        with self._ready:
            if self._closed or self.error is not None:
                self.dropped += 1
                return
            if len(self._pending) >= self._max_pending:
                self.dropped += 1
                is_first = self.dropped == 1
            else:
                self._pending.append((call, first, second))
                self._ready.notify()
                return
        if is_first:
            log.warning(
                "%s is too slow, and misses what comes while %d %s wait for it.",
                self._name,
                self._max_pending,
                self._what,
            )

    def close(self) -> bool:
        """Make the calls that are pending, for a bounded time; whether all are made and the thread
        has ended."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join(self._close_seconds)
        with self._ready:
            left = len(self._pending)
            self._pending.clear()
            self.dropped += left
        done = not left and not self._thread.is_alive()
        if not done:
            log.warning(
                "%s was not done after %g s; it misses %d %s.",
                self._name,
                self._close_seconds,
                self.dropped,
                self._what,
            )
        return done

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._pending and not self._closed:
                    self._ready.wait()
                if not self._pending:
                    return
                call, first, second = self._pending.popleft()
            try:
                call(first, second)
            except Exception as error:
                self._give_up(error)
                return

    def _give_up(self, error: Exception) -> None:
        with self._ready:
            self.error = error
            self.dropped += len(self._pending)
            self._pending.clear()
        log.error(
            "%s raised and is told nothing more, the run goes on: %r",
            self._name,
            error,
            exc_info=error,
        )
