"""A listener that may be slow: it runs in a thread of its own, behind a queue that has an end.

Invariants: whoever is told never waits; what did not fit is dropped, counted and said once, the
rest arrives in order; the thread ends with :meth:`QueuedListener.close`, or with the process.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Self

from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.telemetry.base import Chunks, Listener
from aprilsched.telemetry.queued_calls import QueuedCalls

__all__ = ["QueuedListener"]

_CLOSE_SECONDS = 5.0


class QueuedListener:
    """Passes everything on to `listener`, later and in another thread.

    Use it as ``with QueuedListener(slow) as queued:`` around the scheduler that has it among its
    listeners. A `listener` that raises is told nothing more.

    Args:
        listener: writes to a database, a web service, a slow disk.
        kinds: the types of events and commands that it is told; None for all. Leaving out
            Progress, as most events are, saves most of the queue's time.
        max_pending: events and commands that wait for it at most; what comes on top is dropped.
        close_seconds: that the end of the block waits for what is pending.

    Raises:
        ConfigError: if a number is below its least.
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
        self._calls = QueuedCalls(
            f"the listener {type(listener).__qualname__}",
            "events and commands",
            max_pending=max_pending,
            close_seconds=close_seconds,
        )

    @property
    def dropped(self) -> int:
        """Events and commands that the listener was never told."""
        return self._calls.dropped

    @property
    def error(self) -> Exception | None:
        """What the listener raised; it is told nothing more."""
        return self._calls.error

    def on_event(self, event: Event, now: float) -> None:
        if self._kinds is None or type(event) in self._kinds:
            self._calls.put(self._listener.on_event, event, now)

    def on_progress(self, chunks: Chunks, now: float) -> None:
        for event, at in chunks:
            self.on_event(event, at)

    def on_command(self, command: Command, now: float) -> None:
        if self._kinds is None or type(command) in self._kinds:
            self._calls.put(self._listener.on_command, command, now)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Pass on what is pending, for a bounded time."""
        self._calls.close()
