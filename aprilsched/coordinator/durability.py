"""What makes a run outlive its process: resuming, batches that are acknowledged, checkpoints.

Without a store a batch is handed over at once and forgotten; with one it is handed over when the
store has it, and kept until the trainer says that it is done with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from aprilsched.coordinator.recording import Recorder
from aprilsched.coordinator.tasks import Tasks
from aprilsched.coordinator.waits import Waits
from aprilsched.coordinator.work import Work
from aprilsched.core.batches import handed_over
from aprilsched.core.commands import Deliver, FinishUpdate, Redeliver
from aprilsched.core.events import BatchesAcknowledged, Event
from aprilsched.core.saving.cut import take_everything
from aprilsched.core.saving.saved import Saved
from aprilsched.core.scheduler import Scheduler
from aprilsched.core.state import SchedulerState
from aprilsched.errors import SchedulerClosed
from aprilsched.store.base import Store
from aprilsched.store.sqlite import read_checkpoint, write_checkpoint
from aprilsched.types import Receipt

__all__ = ["Durability"]

log = logging.getLogger("aprilsched")


class Durability:
    """The durable side of one session."""

    def __init__(
        self,
        *,
        core: Scheduler,
        store: Store | None,
        interval_s: float,
        waits: Waits,
        work: Work,
        feed: Callable[[Event], None],
    ) -> None:
        self._core = core
        self._recorder = (
            None if store is None else Recorder(store, core.state, interval_s=interval_s)
        )
        self._inline = store is not None and store.inline
        self._waits = waits
        self._work = work
        self._feed = feed
        self._checkpoint: Saved | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- lifetime ------------------------------------------------------------------------------

    def restore(self, path: Path) -> None:
        """Begin with a checkpoint, whatever the store has.

        Raises:
            StoreError: if it cannot be read.
            SchedulerClosed: if it is too late for that.
        """
        if self._loop is not None:
            raise SchedulerClosed("restore() comes before the `async with` block.")
        self._checkpoint = read_checkpoint(path)

    async def open(self) -> bool:
        """Bring back what was saved. May engines that have a newer version keep it?

        Raises:
            StoreError: if the store cannot be used.
            ConfigError: if what was saved cannot go on in this scheduler.
        """
        self._loop = asyncio.get_running_loop()
        saved, recorder = self._checkpoint, self._recorder
        if recorder is not None:
            self._work.must_be_storable()
            stored = await recorder.open()
            if saved is None:
                saved = stored
            else:
                recorder.begin_anew()
        if saved is not None:
            self._core.restore(saved)
            self._work.pass_over(saved.run.cursor)
            log.warning("the run %s", _resumed(self._core.state))
        # After a checkpoint the engines may have gone on: those versions are void.
        return self._checkpoint is None

    def start(self, tasks: Tasks) -> None:
        if self._recorder is not None:
            self._recorder.start(tasks)

    async def close(self) -> None:
        """Save the end."""
        if self._recorder is not None:
            await self._recorder.close()

    # --- batches -------------------------------------------------------------------------------

    def deliver(self, command: Deliver | Redeliver) -> None:
        """Hand a batch over."""
        batch = command.batch
        if self._recorder is None:
            self._waits.deliver(batch)
            return
        batch = replace(batch, receipt=Receipt(lambda: self.acknowledge((batch.index,))))
        self._recorder.before(lambda: self._waits.deliver(batch))

    def finish_update(self, command: FinishUpdate) -> None:
        """The trainer has its answer; the new version is saved."""
        self._waits.finish_update(command)
        if self._recorder is not None:
            self._recorder.save_soon()

    def trained_on(self) -> tuple[int, ...]:
        """Batches that the trainer was given and has not acknowledged."""
        kept = self._waits.kept
        batches = handed_over(self._core.state)
        return tuple(index for index in batches if kept is None or index != kept.index)

    def acknowledge(self, batches: tuple[int, ...]) -> None:
        """The trainer need not be given these again. From any thread."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        if loop is _running_loop():
            self._acknowledge(batches)
        else:
            loop.call_soon_threadsafe(self._acknowledge, batches)

    def _acknowledge(self, batches: tuple[int, ...]) -> None:
        self._feed(BatchesAcknowledged(batches=batches))
        if self._recorder is not None:
            self._recorder.save_soon()

    async def checkpoint(self, path: Path, *, acknowledge: bool) -> None:
        """See :meth:`RolloutScheduler.checkpoint`."""
        if acknowledge:
            self._acknowledge(self.trained_on())
        cut = take_everything(self._core.state)
        if self._inline:
            write_checkpoint(path, cut)
        else:
            await asyncio.to_thread(write_checkpoint, path, cut)


def _resumed(state: SchedulerState) -> str:
    book = state.book
    tokens = sum(len(rollout.log) for rollout in book.rollouts.values())
    return (
        f"goes on after {book.counters.batches} batches with {len(book.rollouts)} rollouts of "
        f"{tokens:,} tokens in flight, at version {state.tracker.trainer}; "
        f"{len(state.redelivery)} batches are delivered again"
    )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
