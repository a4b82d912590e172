"""A listener that hands the figures of each delivered batch to a tracker.

Invariants: figures are taken in the run's own thread, at the delivery, so they are of one moment;
whatever the tracker does with them is done in another thread, and the run never waits for it.
"""

from __future__ import annotations

from typing import Self

from aprilsched.core.messages.facts import BatchDelivered
from aprilsched.telemetry.live_figures import FiguresListener, LiveFigures
from aprilsched.telemetry.trackers.step_figures import Moment, figures_of
from aprilsched.telemetry.trackers.writers import Writer
from aprilsched.telemetry.usage.parts import PARTS, Part
from aprilsched.telemetry.worker import Worker

__all__ = ["StepTracker"]

_MAX_PENDING = 1_000
_CLOSE_SECONDS = 30.0


class StepTracker(FiguresListener):
    """Writes to `writer` and closes it, both in a worker thread. Use it as
    ``with StepTracker(writer) as tracker:`` around the scheduler that has it among its listeners.

    Args:
        figures: LiveFigures that are a listener of their own, before this one; None keeps
            one inside.
        close_seconds: how long the end of the block waits until everything is written and the
            writer is closed.
    """

    def __init__(
        self,
        writer: Writer,
        figures: LiveFigures | None = None,
        *,
        close_seconds: float = _CLOSE_SECONDS,
    ) -> None:
        super().__init__(figures)
        self._handlers = {BatchDelivered: self._step}
        self._writer = writer
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        """Of all engines, at the batch before."""
        self._worker = Worker(
            f"the tracker {type(writer).__qualname__}",
            "steps",
            max_pending=_MAX_PENDING,
            close_seconds=close_seconds,
            at_end=writer.close,
        )

    @property
    def error(self) -> BaseException | None:
        """What the writer raised. It is given nothing more."""
        return self._worker.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is pending and close the writer, for a bounded time."""
        self._worker.close()

    def _step(self, fact: BatchDelivered) -> None:
        if fact.again:
            return
        figures = self._figures
        with figures.lock:
            # To the delivery, and not to now: a scrape may have looked further.
            figures.state.advance(figures.now)
            seconds, batch = figures.state.seconds(), figures.batch
            if batch is None:
                return
            moment = Moment(
                batch=batch,
                counters=figures.counters,
                ledger=figures.ledger,
                spent={part: max(0.0, seconds[part] - self._seconds[part]) for part in PARTS},
                groups_ready=figures.state.groups_ready,
            )
            self._seconds = seconds
            figures = figures_of(moment)
        self._worker.put(self._writer.write, fact.batch, figures)
