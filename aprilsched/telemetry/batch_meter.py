"""The figures of each batch as it is delivered, with the trainer's own time told apart.

Invariant: only what is needed for the batch in work is kept, however long a run is.
"""

from __future__ import annotations

from aprilsched.core.messages import facts as of
from aprilsched.telemetry.batch_figures import Bound, Measured, measure
from aprilsched.telemetry.dispatching import DispatchingListener

__all__ = ["BatchMeter"]


class BatchMeter(DispatchingListener):
    """Listens to a run and measures its batches.

    Args:
        trainer_waits: the engines stand still while the trainer trains (synchronous pace), so its
            time is not the schedule's.
        bound: T_bound of a batch; None where no step-time model is known.
    """

    def __init__(self, *, trainer_waits: bool, bound: Bound | None = None) -> None:
        super().__init__()
        self.latest: Measured | None = None
        """The batch that was delivered last."""
        self.trainer_seconds = 0.0
        """Of the trainer, over all batches."""
        self._trainer_waits = trainer_waits
        self._bound = bound
        self._parts: set[str] = set()
        """Names of the parts of rewards that are counted."""
        self._began = False
        self._delivered_at = 0.0
        self._trainer = 0.0
        """Seconds of the trainer since the last delivery."""
        self._idle_since: float | None = None
        """The trainer has the last batch and nothing else goes on."""
        self._handlers = {
            of.RunOpened: self._opened,
            of.BatchRequested: self._busy,
            of.UpdateBegun: self._busy,
            of.UpdateFinished: self._idle,
            of.BatchDelivered: self._delivered,
        }

    def deliver(self, batch: of.BatchDelivered, now: float) -> Measured:
        """The figures of `batch`, which is delivered `now`."""
        took = now - self._delivered_at - self._trainer
        self.latest = measure(
            batch,
            seconds=took,
            trainer_seconds=self._trainer,
            bound=self._bound,
            parts=self._parts,
        )
        self._trainer = 0.0
        self._delivered_at = self._idle_since = now
        return self.latest

    def _delivered(self, fact: of.BatchDelivered) -> None:
        if fact.again:
            self._idle(fact)
        else:
            self.deliver(fact, self._now)

    def _opened(self, _: of.RunOpened) -> None:
        if self._began:
            self._stop_idling()
        else:
            self._began = True
            self._delivered_at = self._now
        self._idle_since = self._now

    def _busy(self, _: of.BatchRequested | of.UpdateBegun) -> None:
        self._stop_idling()

    def _idle(self, _: of.UpdateFinished | of.BatchDelivered) -> None:
        self._idle_since = self._now

    def _stop_idling(self) -> None:
        if self._idle_since is not None and self._trainer_waits:
            self._trainer += self._now - self._idle_since
            self.trainer_seconds += self._now - self._idle_since
        self._idle_since = None
