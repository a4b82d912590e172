"""What can be said of a run while it goes on: one account for all listeners that export it.

Invariants: nothing is counted here that the scheduler, its summary or another part of telemetry
counts already; the account is read under :attr:`LiveFigures.lock`, so that another thread sees the
figures of one moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.core.state.ledger import Counters, Ledger
from aprilsched.telemetry.base import BulkListener, Chunks
from aprilsched.telemetry.batch_figures import Measured
from aprilsched.telemetry.batch_meter import BatchMeter
from aprilsched.telemetry.books import Books
from aprilsched.telemetry.dispatching import DispatchingListener
from aprilsched.telemetry.usage.usage import Usage

__all__ = ["FiguresListener", "LiveFigures"]


class LiveFigures:
    """A listener; it stands before those that read it.

    Args:
        meter: one that is told of the run by somebody else before this listener is; None makes
            one for an asynchronous trainer.
        batch_groups: that of the scheduler; None is learnt from the first batch.
        clock: the one that events are timed with; None for one that cannot be read from another
            thread (a virtual one, a log's), whose time is that of the last event then.
    """

    def __init__(
        self,
        *,
        meter: BatchMeter | None = None,
        batch_groups: int | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self.now = 0.0
        """Of the last event or command."""
        self.usage = Usage(batch_groups=batch_groups)
        self._meter = meter or BatchMeter(trainer_waits=False)
        self._clock = clock
        books = Books()
        self.counters: Counters = books.counters
        self.ledger: Ledger = books.ledger
        self._books = books
        self._told: tuple[BulkListener, ...] = (self.usage, books)
        if meter is None:
            self._told = (self._meter, *self._told)

    def count_with(self, counters: Counters, ledger: Ledger) -> None:
        """Take the scheduler's own counts (``rollouts.state.book``) and keep none beside them."""
        self.counters, self.ledger = counters, ledger
        self._told = tuple(each for each in self._told if each is not self._books)

    @property
    def batch(self) -> Measured | None:
        """The last one."""
        return self._meter.latest

    def advance(self) -> float:
        """Bring the engines' seconds up to now, which it says. Call it with the lock held."""
        now = self.now if self._clock is None else max(self.now, self._clock())
        self.usage.advance(now)
        return now

    def on_event(self, event: Event, now: float) -> None:
        with self.lock:
            self.now = now
            for each in self._told:
                each.on_event(event, now)

    def on_progress(self, chunks: Chunks, now: float) -> None:
        with self.lock:
            self.now = now
            for each in self._told:
                each.on_progress(chunks, now)

    def on_command(self, command: Command, now: float) -> None:
        with self.lock:
            self.now = now
            for each in self._told:
                each.on_command(command, now)


class FiguresListener(DispatchingListener):
    """One that looks at the account of a run: at `figures`, which stand before it among the
    listeners, or at one of its own, which it tells everything. Chunks are for the account alone."""

    def __init__(self, figures: LiveFigures | None = None) -> None:
        super().__init__()
        self._figures = figures or LiveFigures()
        self._inside = figures is None

    def on_event(self, event: Event, now: float) -> None:
        if self._inside:
            self._figures.on_event(event, now)
        self.hear(event, now)

    def on_progress(self, chunks: Chunks, now: float) -> None:
        if self._inside:
            self._figures.on_progress(chunks, now)

    def on_command(self, command: Command, now: float) -> None:
        if self._inside:
            self._figures.on_command(command, now)
        self.hear(command, now)
