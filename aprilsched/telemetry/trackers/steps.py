"""A listener that gives the figures of each delivered batch to an experiment tracker.

Invariants: the figures are taken in the run's own thread at the delivery, so they are of one
moment. The tracker runs in another thread, and the run never waits for it.
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
    """Gives the figures to `writer` and closes it at the end, both in a worker thread.

    Use it as ``with StepTracker(writer) as tracker:`` around the scheduler, and pass it to the
    scheduler as a listener.

    Args:
        figures: LiveFigures that are a listener before this one. If it is None, the tracker keeps
            figures of its own.
        close_seconds: seconds that the end of the block waits at most until everything is written
            and the writer is closed.
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
        """Seconds of all engines by part, at the previous batch."""
        self._worker = Worker(
            f"the tracker {type(writer).__qualname__}",
            "steps",
            max_pending=_MAX_PENDING,
            close_seconds=close_seconds,
            at_end=writer.close,
        )

    @property
    def error(self) -> BaseException | None:
        """The error of the writer, after which it gets nothing more; None if there was none."""
        return self._worker.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what is pending and close the writer, in bounded time."""
        self._worker.close()

    def _step(self, fact: BatchDelivered) -> None:
        if fact.again:
            return
        figures = self._figures
        with figures.lock:
            # The time is counted up to the delivery and not up to now, because a scrape may have
            # counted further.
            figures.state.advance(figures.state.now)
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
