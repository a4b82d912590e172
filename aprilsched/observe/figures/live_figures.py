"""Shares the state of a run in progress among the listeners that show or export it.

Invariants: nothing is counted here, because the scheduler, the summary and the state of the run
already count. Figures are read under :attr:`LiveFigures.lock`, so that another thread sees a
consistent state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.core.state.ledger import Counters, Ledger
from aprilsched.kernel.shell.listener import BulkListener, TokenChunks
from aprilsched.observe.figures.batch_figures import BatchMeter
from aprilsched.observe.figures.figures import Measured
from aprilsched.observe.figures.rollout_time import RolloutClock
from aprilsched.observe.figures.run_state import RunState


class LiveFigures:
    """The state of a run and its latest batch, for several readers and from any thread.

    It is a listener, and must precede its readers among the listeners of a run.

    Args:
        meter: a meter that is an earlier listener of the run, or part of one (as in the summary).
            None creates one for an asynchronous trainer.
        batch_units: number of groups, or of single samples, per batch: the `batch_units` of the
            scheduler's configuration. None takes it from the first delivered batch.
        clock: the clock of the facts' times. None is for a clock that another thread cannot read,
            such as a virtual clock or the times of a log; the time of the last fact is then "now".

    Attributes:
        lock: must be held while the other attributes are read.
        state: the state of the run.
        counters, ledger: the state's counters and ledger, or the scheduler's (:meth:`count_with`).
    """

    def __init__(
        self,
        *,
        meter: BatchMeter | None = None,
        batch_units: int | None = None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> None:
        self.lock = threading.Lock()
        self.state = RunState(batch_units=batch_units)
        self._meter = meter or BatchMeter()
        self._clock = clock
        self.counters: Counters = self.state.counters
        self.ledger: Ledger = self.state.ledger
        self._told: tuple[BulkListener, ...] = (self.state,)
        if meter is None:
            self._told = (self._meter, self.state)

    def count_with(self, counters: Counters, ledger: Ledger) -> None:
        """Use the scheduler's counts (``rollouts.state.in_flight``). In a resumed run they cover
        the whole run, including the prior run."""
        self.counters, self.ledger = counters, ledger

    @property
    def batch(self) -> Measured | None:
        """The batch that was delivered last; None before the first."""
        return self._meter.latest

    @property
    def recent(self) -> Sequence[Measured]:
        """The batches that were delivered last, at most
        :data:`~aprilsched.observe.figures.batch_figures.RECENT_BATCHES`."""
        return self._meter.recent

    @property
    def delivered_at(self) -> float:
        """Time of the latest delivery; the start of the run before the first."""
        return self._meter.time.delivered_at

    @property
    def rollouts(self) -> Mapping[int, RolloutClock]:
        """The clock of each rollout in flight, by its id."""
        return self._meter.rollouts

    def advance(self) -> float:
        """Count the engines' time up to now, and return the time. The lock must be held."""
        now = self.state.now if self._clock is None else max(self.state.now, self._clock())
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
