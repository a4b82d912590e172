"""A listener that may be slow: it runs in a thread of its own, behind a queue that has an end.

Invariants: whoever is told never waits; what did not fit is dropped, counted and said once, the
rest arrives in order; the thread ends with :meth:`QueuedListener.close`, or with the process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Self

from aprilsched.core.messages.facts import Fact, TokensReceived
from aprilsched.telemetry.base import Listener, TokenChunks
from aprilsched.telemetry.queued_calls import QueuedCalls

__all__ = ["QueuedListener"]

_CLOSE_SECONDS = 5.0


class QueuedListener:
    """Passes everything on to `listener`, later and in another thread.

    Use it as ``with QueuedListener(slow) as queued:`` around the scheduler that has it among its
    listeners. A `listener` that raises is told nothing more.

    Args:
        listener: writes to a database, a web service, a slow disk.
        kinds: the facts that it is told; None for all. Leaving out TokensReceived, as most facts
            are, saves most of the queue's time.
        max_pending: events whose facts wait for it at most; what comes on top is dropped.
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
            "facts",
            max_pending=max_pending,
            close_seconds=close_seconds,
        )

    @property
    def dropped(self) -> int:
        """Events whose facts the listener was never told."""
        return self._calls.dropped

    @property
    def error(self) -> Exception | None:
        """What the listener raised; it is told nothing more."""
        return self._calls.error

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        if self._kinds is not None:
            facts = [fact for fact in facts if fact.__class__ in self._kinds]
        if facts:
            self._calls.put(self._listener.on_facts, facts, now)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        if self._kinds is None or TokensReceived in self._kinds:
            for fact, at in chunks:
                self._calls.put(self._listener.on_facts, (fact,), at)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Pass on what is pending, for a bounded time."""
        self._calls.close()
