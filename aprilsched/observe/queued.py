"""Runs a slow listener in a worker thread, behind a bounded queue.

Invariants: the run never waits for the listener; facts that do not fit into the queue are dropped,
counted and logged once, and the rest arrive in order; the thread ends with
:meth:`QueuedListener.close`, or with the process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aprilsched.kernel.core.messages.facts import Fact, TokensReceived
from aprilsched.kernel.shell.listener import Listener, TokenChunks
from aprilsched.observe.worker import HasWorker, Worker

_CLOSE_SECONDS = 5.0


class QueuedListener(HasWorker):
    """Passes facts on to `listener`, later and in another thread.

    Use it as ``with QueuedListener(slow) as queued:`` around the scheduler, and pass `queued` as
    one of its listeners. A `listener` that raises receives no further facts. A forked process does
    not have the thread, so the listener receives nothing from it.

    Args:
        listener: for example one that writes to a database, a web service or a slow disk.
        kinds: the kinds of facts that the listener receives; None means all. Most facts are
            TokensReceived, so omitting these saves most of the queue's time.
        max_pending: largest number of pending events, with their facts; further ones are dropped.
        close_seconds: how long the end of the block waits for pending events.

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
        """Number of events whose facts never reached the listener."""
        return self._worker.dropped

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        if self._kinds is not None:
            facts = [fact for fact in facts if fact.__class__ in self._kinds]
        if facts:
            self._worker.put(self._listener.on_facts, facts, now)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        if self._kinds is None or TokensReceived in self._kinds:
            for fact, at in chunks:
                self._worker.put(self._listener.on_facts, (fact,), at)
