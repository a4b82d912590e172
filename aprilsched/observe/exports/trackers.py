"""Sends the figures of each delivered batch to experiment trackers: wandb, trackio, TensorBoard.

Invariants: the figures are read in the run's thread at the delivery, so they are consistent. The
tracker runs in another thread, and the run never waits for it.
"""

# The trackers' packages have no types, and some make their classes when they are imported. trackio
# cannot be in the environment of the checks, because it needs an older pillow than matplotlib.
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from aprilsched.kernel.core.messages.facts import BatchDelivered
from aprilsched.kernel.shell.listener import DispatchingListener
from aprilsched.observe.figures.engine_time import PARTS, Part
from aprilsched.observe.figures.live_figures import LiveFigures
from aprilsched.observe.figures.table import FIGURES, Moment, values_at
from aprilsched.observe.worker import HasWorker, Worker

_MAX_PENDING = 1_000
_CLOSE_SECONDS = 30.0
FLUSH_SECONDS = 5
PROJECT = "aprilsched"


class Writer(Protocol):
    """Writes the figures of each step to one tracker. It may be slow: its methods run in a separate
    thread, one at a time."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of one step, by name; steps come in order."""
        ...

    def close(self) -> None:
        """Write what is pending. Called once, in the thread that started the writer."""
        ...


class StepTracker(HasWorker, DispatchingListener):
    """Sends the figures of each batch to `writer` and closes it at the end, both in a worker
    thread. The step is the number of the delivered batch.

    Use it as ``with StepTracker(writer, figures) as tracker:`` around the scheduler, and pass both
    to the scheduler as listeners.

    Args:
        figures: the figures of the run, an earlier listener.
        close_seconds: longest time that the end of the block waits for pending writes and for the
            writer to close.
    """

    def __init__(
        self,
        writer: Writer,
        figures: LiveFigures,
        *,
        close_seconds: float = _CLOSE_SECONDS,
    ) -> None:
        super().__init__()
        self._figures = figures
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

    def _step(self, fact: BatchDelivered) -> None:
        if fact.again:
            return
        figures = self._figures
        with figures.lock:
            # Count the time up to the delivery, not up to now: a scrape may have counted further.
            figures.state.advance(figures.state.now)
            seconds = figures.state.seconds()
            if figures.batch is None:
                return
            spent: dict[Part, float] = {
                part: max(0.0, seconds[part] - self._seconds[part]) for part in PARTS
            }
            self._seconds = seconds
            written = _written(Moment(figures=figures, spent=spent))
        self._worker.put(self._writer.write, fact.batch, written)


def _written(moment: Moment) -> dict[str, float]:
    """Return the figures of a batch by name, without unknown ones."""
    values = {name: values_at(each, moment) for name, each in FIGURES.items() if each.tracked}
    found = {name: float(sum(value.values())) for name, value in values.items() if value}
    if moment.figures.batch is not None:
        parts = moment.figures.batch.figures.rewards.parts
        found |= {f"batch/reward/{name}": value for name, value in parts.items()}
    return found
