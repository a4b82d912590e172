"""What makes a run outlive its process: resuming, batches that are acknowledged, checkpoints.

Without a store a batch is handed over at once and forgotten; with one it is handed over when the
store has it, and kept until the trainer says that it is done with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from aprilsched.coordinator.recording import Recorder
from aprilsched.coordinator.tasks import Tasks
from aprilsched.coordinator.waits import Waits
from aprilsched.coordinator.work import Work
from aprilsched.core.batches import handed_over
from aprilsched.core.commands import FinishUpdate, Offer
from aprilsched.core.events import BatchesAcknowledged, Event
from aprilsched.core.saving.cut import take_checkpoint
from aprilsched.core.saving.saved import Saved
from aprilsched.core.scheduler import Scheduler
from aprilsched.core.state import SchedulerState
from aprilsched.errors import ConfigError, SchedulerClosed, StoreError
from aprilsched.store.base import Store
from aprilsched.store.sqlite import read_checkpoint, write_checkpoint
from aprilsched.types import Receipt

__all__ = ["Durability"]

log = logging.getLogger("aprilsched")

_SAFE_S = 30.0
"""As long as closing waits for the store."""


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
        self._safe: asyncio.Future[None] | None = None
        self._pid = os.getpid()

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
        self._pid = os.getpid()
        saved, recorder = self._checkpoint, self._recorder
        if recorder is not None:
            self._work.must_be_storable()
            stored = await recorder.open()
            if saved is None:
                saved = stored
            else:
                recorder.begin_anew()
        if saved is not None:
            self._restore(saved)
            self._work.pass_over(saved.run.cursor)
            log.warning("the run %s", _resumed(self._core.state))
        # After a checkpoint the engines may have gone on: those versions are void.
        return self._checkpoint is None

    def _restore(self, saved: Saved) -> None:
        try:
            self._core.restore(saved)
            self._core.check_invariants()
        except ConfigError:
            raise
        except Exception as error:
            raise StoreError(
                f"what was saved is of no run that can go on ({error}); restore a checkpoint, or "
                "begin with a new store."
            ) from error

    def start(self, tasks: Tasks) -> None:
        if self._recorder is not None:
            self._recorder.start(tasks)

    async def close(self) -> None:
        """Save the end."""
        if self._recorder is not None:
            await self._recorder.close()

    # --- batches -------------------------------------------------------------------------------

    def offer(self, command: Offer) -> None:
        """Show a batch to the trainer when the store has it."""
        offered = command.offered
        if self._recorder is None:
            self._waits.show(offered)
            return
        batch = replace(offered, receipt=Receipt(lambda: self.acknowledge((offered.index,))))

        def show() -> None:
            # While it was written, a new version may have come.
            offer = self._core.state.offer
            if offer is not None and offer.batch is offered:
                self._waits.show(batch)

        self._recorder.before(show)

    def finish_update(self, command: FinishUpdate) -> None:
        """The new version, and that the batches before it are acknowledged, is saved."""
        if self._recorder is not None:
            self._safe = safe = asyncio.get_running_loop().create_future()
            self._recorder.before(lambda: _resolve(safe))
        self._waits.finish_update(command)

    async def safe(self) -> None:
        """Wait, not for ever, until the store has what the last update brought."""
        if self._safe is None:
            return
        done, _ = await asyncio.wait([self._safe], timeout=_SAFE_S)
        if not done:
            log.warning(
                "the store has not taken the last update within %g s; until it has, a restart may "
                "deliver batches again that were acknowledged",
                _SAFE_S,
            )

    def trained_on(self) -> tuple[int, ...]:
        """Batches that the trainer was given and has not acknowledged."""
        return handed_over(self._core.state)

    def acknowledge(self, batches: tuple[int, ...]) -> None:
        """The trainer need not be given these again. From any thread.

        Raises:
            ConfigError: in a process that was forked from the scheduler's.
        """
        if self._pid != os.getpid():
            raise Receipt.elsewhere()
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
        batches = self.trained_on() if acknowledge else ()
        cut = take_checkpoint(self._core.state, without=batches)
        if self._inline:
            write_checkpoint(path, cut)
        else:
            await asyncio.to_thread(write_checkpoint, path, cut)
        # Not before the file is there: what it does not hold must be delivered again.
        if batches:
            self._acknowledge(batches)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


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
