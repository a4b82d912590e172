"""What can be said of a run while it goes on: one account for all listeners that export it.

Invariants: nothing is counted here that the scheduler, its summary or the state of the run counts
already; the figures are read under :attr:`LiveFigures.lock`, so that another thread sees figures
of one moment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from aprilsched.core.messages.facts import Fact
from aprilsched.core.state.ledger import Counters, Ledger
from aprilsched.telemetry.base import BulkListener, TokenChunks
from aprilsched.telemetry.batch_figures import BatchMeter, Measured
from aprilsched.telemetry.dispatching import DispatchingListener
from aprilsched.telemetry.run_state import RunState

__all__ = ["FiguresListener", "LiveFigures"]


class LiveFigures:
    """A listener; it stands before those that read it.

    Args:
        meter: one that is told of the run by somebody else before this listener is; None makes
            one for an asynchronous trainer.
        batch_groups: that of the scheduler; None is learnt from the first batch.
        clock: the one that facts are timed with; None for one that cannot be read from another
            thread (a virtual one, a log's), whose time is that of the last fact then.
    """

    def __init__(
        self,
        *,
        meter: BatchMeter | None = None,
        batch_groups: int | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self.state = RunState(batch_groups=batch_groups)
        self._meter = meter or BatchMeter(trainer_waits=False)
        self._clock = clock
        self.counters: Counters = self.state.counters
        self.ledger: Ledger = self.state.ledger
        self._told: tuple[BulkListener, ...] = (self.state,)
        if meter is None:
            self._told = (self._meter, self.state)

    def count_with(self, counters: Counters, ledger: Ledger) -> None:
        """Show the scheduler's own counts (``rollouts.state.in_flight``). In a resumed run they are
        those of the whole run, the prior run included."""
        self.counters, self.ledger = counters, ledger

    @property
    def now(self) -> float:
        """The time of the last fact."""
        return self.state.now

    @property
    def batch(self) -> Measured | None:
        """The last one."""
        return self._meter.latest

    def advance(self) -> float:
        """Bring the engines' seconds up to now, which it says. Call it with the lock held."""
        now = self.now if self._clock is None else max(self.now, self._clock())
        self.state.advance(now)
        return now

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        with self.lock:
            for each in self._told:
                each.on_facts(facts, now)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        with self.lock:
            for each in self._told:
                each.on_tokens(chunks, now)


class FiguresListener(DispatchingListener):
    """One that reads the live figures of a run: those at `figures`, which stand before it among the
    listeners, or at one of its own, which it tells everything. Chunks are for the figures alone."""

    def __init__(self, figures: LiveFigures | None = None) -> None:
        super().__init__()
        self._figures = figures or LiveFigures()
        self._inside = figures is None

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        if not self._inside:
            self.react(facts, now)
            return
        # One at a time, so that each is seen as it was when it came true.
        for fact in facts:
            self._figures.on_facts((fact,), now)
            self.react((fact,), now)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        if self._inside:
            self._figures.on_tokens(chunks, now)

    def react(self, facts: Sequence[Fact], now: float) -> None:
        """The figures have been told these facts."""
        super().on_facts(facts, now)
