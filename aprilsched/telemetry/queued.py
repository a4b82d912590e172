"""A listener that may be slow: it runs in a thread of its own, behind a queue that has an end.

Invariants: whoever is told never waits; what did not fit is dropped, counted and said once, the
rest arrives in order; the thread ends with :meth:`QueuedListener.close`, or with the process.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from aprilsched.core.commands import Command
from aprilsched.core.events import Event
from aprilsched.errors import ConfigError
from aprilsched.telemetry.base import Listener

__all__ = ["QueuedListener"]

log = logging.getLogger("aprilsched")

_CLOSE_SECONDS = 5.0


class QueuedListener:
    """Passes everything on to `listener`, later and in another thread.

    Use it as ``with QueuedListener(slow) as queued:`` around the scheduler that has it among its
    listeners. A `listener` that raises is told nothing more.

    Args:
        listener: writes to a database, a web service, a slow disk.
        max_pending: events and commands that wait for it at most; what comes on top is dropped.
        close_seconds: that the end of the block waits for what is pending.

    Raises:
        ConfigError: if a number is below its least.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        max_pending: int = 100_000,
        close_seconds: float = _CLOSE_SECONDS,
    ) -> None:
        if max_pending < 1:
            raise ConfigError(f"max_pending is {max_pending}; give 1 or more.")
        if close_seconds < 0:
            raise ConfigError(f"close_seconds is {close_seconds}; give 0 or more.")
        self.dropped = 0
        """Events and commands that the listener was never told."""
        self.error: Exception | None = None
        """What the listener raised; it is told nothing more."""
        self._listener = listener
        self._name = type(listener).__qualname__
        self._max_pending = max_pending
        self._close_seconds = close_seconds
        self._pending: deque[tuple[Callable[[Any, float], None], Any, float]] = deque()
        self._ready = threading.Condition()
        self._closed = False
        # A daemon: a listener that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"to {self._name}", daemon=True)
        self._thread.start()

    def on_event(self, event: Event, now: float) -> None:
        self._put(self._listener.on_event, event, now)

    def on_command(self, command: Command, now: float) -> None:
        self._put(self._listener.on_command, command, now)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Pass on what is pending, for a bounded time."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._thread.join(self._close_seconds)
        with self._ready:
            left = len(self._pending)
            self._pending.clear()
            self.dropped += left
        if left or self._thread.is_alive():
            log.warning(
                "the listener %s was not done after %g s; it misses %d events and commands.",
                self._name,
                self._close_seconds,
                self.dropped,
            )

    def _put(self, call: Callable[[Any, float], None], what: Any, now: float) -> None:
        with self._ready:
            if self._closed or self.error is not None:
                self.dropped += 1
                return
            if len(self._pending) >= self._max_pending:
                self.dropped += 1
                first = self.dropped == 1
            else:
                self._pending.append((call, what, now))
                self._ready.notify()
                return
        if first:
            log.warning(
                "the listener %s is too slow, and misses what comes while %d events and commands "
                "wait for it.",
                self._name,
                self._max_pending,
            )

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._pending and not self._closed:
                    self._ready.wait()
                if not self._pending:
                    return
                call, what, now = self._pending.popleft()
            try:
                call(what, now)
            except Exception as error:
                self._give_up(error)
                return

    def _give_up(self, error: Exception) -> None:
        with self._ready:
            self.error = error
            self.dropped += len(self._pending)
            self._pending.clear()
        log.error(
            "the listener %s raised and is told nothing more, the run goes on: %r",
            self._name,
            error,
            exc_info=error,
        )
