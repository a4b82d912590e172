"""Lets a run continue after its process has ended: saves it, resumes it, writes checkpoints.

Without a store, a batch is offered to the trainer at once and is then forgotten. With a store, a
batch, or a group of a streamed one, is offered when the store has it, and a batch is kept until the
trainer acknowledges it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from aprilsched.errors import AprilschedError, ConfigError, SchedulerClosed, StoreError
from aprilsched.kernel.core.messages.commands import Deliver, Offer
from aprilsched.kernel.core.messages.events import BatchesAcknowledged, PartsFollow
from aprilsched.kernel.core.messages.facts import UpdateFinished
from aprilsched.kernel.core.scheduler import Scheduler
from aprilsched.kernel.core.state.saved import Saved, Snapshot
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.steps.batch import handed_over
from aprilsched.kernel.core.steps.snapshot import take_changes, take_checkpoint, take_full
from aprilsched.kernel.shell.tasks import Part, Shell
from aprilsched.kernel.shell.waits import Waits
from aprilsched.kernel.shell.work import Work
from aprilsched.kernel.store.in_memory import Store
from aprilsched.kernel.store.sqlite_checkpoints import read_checkpoint, write_checkpoint
from aprilsched.types import Receipt

log = logging.getLogger("aprilsched")

T = TypeVar("T")

_SAFE_S = 30.0
"""Seconds that an update waits at most until the store has saved it."""
FINISHED_S = 0.5
"""Seconds after which finished rollouts are saved at the latest."""
_AGAIN_S = 10.0
"""Seconds until the next try after a failed write."""
_REST = 4.0
"""Pause between two saves for answers, in durations of a save. Each has all tokens that arrived
since the last one, so the store would have no other work than many small ones."""
_CLOSE_S = 30.0
"""Seconds that closing waits for the store at most."""


@dataclass(frozen=True, slots=True)
class _Write:
    snapshot: Snapshot
    durable: bool
    then: Callable[[], None] | None
    waiting: list[asyncio.Future[None]]
    started_at: float


class Durability(Part):
    """Resumes and saves the run of one session, if there is a store.

    Attributes:
        error: why the store does not save the run at present; None while it does.
    """

    def __init__(
        self, shell: Shell, *, core: Scheduler, store: Store | None, waits: Waits, work: Work
    ) -> None:
        super().__init__(shell)
        self.error: str | None = None
        self._core = core
        self._store = store
        self._waits = waits
        self._work = work
        self.former: str | None = None
        """Name of the process that saved the restored run; None if none is restored."""
        self._checkpoint: Saved | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._safe: asyncio.Future[None] | None = None
        self._pid = os.getpid()
        self._interval_s = shell.config.save_interval_s
        self._thread = (
            None if store is None or store.inline else ThreadPoolExecutor(1, "aprilsched-store")
        )
        self._queue: deque[_Write] = deque()
        self._waiting = asyncio.Event()
        self._writing: asyncio.Future[None] | None = None
        self._writes = 0
        """Snapshots that the store has not taken yet."""
        self._soon = False
        self._closed = False
        self._answers: list[asyncio.Future[None]] = []
        """The changes that wait for the next save."""
        self._rest_until = 0.0
        self._full_next = False
        self._saved_at = 0.0
        self._failed_at = 0.0

    @property
    def stored(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    @property
    def restores(self) -> bool:
        """Whether the run starts from a checkpoint."""
        return self._checkpoint is not None

    # --- lifetime ------------------------------------------------------------------------------

    def restore(self, path: Path) -> None:
        """Start from a checkpoint instead of the store's content.

        Raises:
            StoreError: if the checkpoint cannot be read.
            SchedulerClosed: if the scheduler was opened already.
        """
        if self._loop is not None:
            raise SchedulerClosed("restore() comes before the `async with` block.")
        self._checkpoint = read_checkpoint(path)

    async def open(self) -> None:
        """Restore the saved state, if there is one.

        Raises:
            StoreError: if the store cannot be used.
            ConfigError: if this scheduler cannot continue the saved run.
        """
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        saved = self._checkpoint
        if self._store is not None:
            self._work.must_be_storable()
            stored = await self._call(self._store.open)
            self._core.state.in_flight.journal.active = True
            if saved is None:
                saved = stored
            else:
                # The next write replaces what is stored.
                self._full_next = True
        if saved is not None:
            self._restore(saved)
            self.former = saved.run.process
            self._work.pass_over(saved.run.cursor)
            log.warning("the run %s", _resumed(self._core.state))

    def _restore(self, saved: Saved) -> None:
        try:
            self._core.restore(saved)
            self._core.check_invariants()
        except ConfigError:
            raise
        except Exception as error:
            raise StoreError(
                f"what was saved is not a run that can continue ({error}); restore a checkpoint, "
                "or start with a new store."
            ) from error

    def start(self) -> None:
        if self._store is not None:
            # At once, because the engines' labels have this process's name.
            self._save()
            self._tasks.start("recorder", self._save_in_time())
            self._tasks.start("store", self._write_all())

    async def close(self) -> None:
        """Save the final state, and close the store."""
        if self._store is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                if self._writing is not None:
                    await asyncio.wait([self._writing])
                self._save(last=True)
                while self._queue:
                    await self._write(self._queue.popleft())
                await self._call(self._store.close)
        except TimeoutError:
            log.error("the store did not take the last snapshot within %g s", _CLOSE_S)
        except AprilschedError as error:
            log.error("the store could not be closed: %s", error)
        finally:
            self._closed = True
            _release(self._answers)
            if self._thread is not None:
                self._thread.shutdown(wait=False)

    # --- batches -------------------------------------------------------------------------------

    def offer(self, command: Offer) -> None:
        """Offer a batch, or a part of one, to the trainer when the store has it."""
        batch = offered = command.offered
        if self._store is None:
            self._waits.show(offered)
            return
        if offered.complete:
            batch = replace(offered, receipt=Receipt(lambda: self.acknowledge((offered.index,))))

        def show() -> None:
            # A new version may have arrived while the batch was written.
            offer = self._core.state.delivery.offer
            if offer is not None and offer.content is offered:
                self._waits.show(batch)

        self._save(durable=True, then=show)

    def deliver(self, command: Deliver) -> None:
        """Save a batch that was taken group by group and has ended early. If the process is killed
        right after that, the trainer may have trained on it, and a resumed run must give it again
        as it was."""
        if self._store is not None and command.unsaved:
            self._save(durable=True)

    def finish_update(self, command: UpdateFinished) -> None:
        """Save the new version and that the batches before it are acknowledged."""
        if self._store is not None:
            self._safe = self._saved()
        self._waits.finish_update(command)

    async def note_parts(self) -> None:
        """Save that the next update loads weights in parts, before the first part is loaded.

        Otherwise a process that resumes after a kill during the update would trust the label of an
        engine that has parts of two versions.
        """
        if self._store is None:
            return
        self._feed(PartsFollow())
        await _taken(
            self._saved(),
            "the store has not taken the beginning of an update within %g s; if the process is "
            "killed before the update has ended, use new servers, or update first",
        )

    async def safe(self) -> None:
        """Wait until the store has saved the last update, at most :data:`_SAFE_S`."""
        if self._safe is not None:
            await _taken(
                self._safe,
                "the store has not taken the last update within %g s; until it has, a restart may "
                "deliver batches again that were acknowledged",
            )

    def trained_on(self) -> tuple[int, ...]:
        """Numbers of the batches that the trainer has and has not acknowledged."""
        return handed_over(self._core.state.in_flight, self._core.state.delivery)

    def acknowledge(self, batches: tuple[int, ...]) -> None:
        """Record that these batches need not be delivered again. Any thread may call this.

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
        if self._store is not None and not self._soon:
            self._soon = True
            # Not at once, because further events may belong to the one that is being handled.
            asyncio.get_running_loop().call_soon(self._save)

    async def saved(self) -> None:
        """Wait until everything up to now survives the end of the process.

        Without a store, or while it fails, this returns at once. Calls that wait at the same time
        share a save.
        """
        if self._store is None or self._closed:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answers.append(waiting)
        self._save_answers()
        await waiting

    def _save_answers(self) -> None:
        """Save for what waits, unless a write is under way: the next one follows it."""
        if self._answers and not (self._soon or self._writes):
            self._soon = True
            asyncio.get_running_loop().call_at(self._rest_until, self._save)

    async def checkpoint(self, path: Path, *, acknowledge: bool) -> None:
        """See :meth:`RolloutScheduler.checkpoint`."""
        batches = self.trained_on() if acknowledge else ()
        snapshot = take_checkpoint(self._core.state, without=batches)
        # Also with a store in memory: requests stream while a large file is written.
        await asyncio.to_thread(write_checkpoint, path, snapshot)
        # Only now, because batches that are not in the file must be delivered again.
        if batches:
            self._acknowledge(batches)

    # --- saving --------------------------------------------------------------------------------

    def _saved(self) -> asyncio.Future[None]:
        """Save everything up to now; the future is done when the store has it."""
        saved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._save(durable=True, then=lambda: None if saved.done() else saved.set_result(None))
        return saved

    def _save(
        self,
        *,
        durable: bool = False,
        then: Callable[[], None] | None = None,
        last: bool = False,
    ) -> None:
        self._soon = False
        if self._closed:
            return
        if self.error is not None and not last and _now() < self._failed_at + _AGAIN_S:
            # The journal would grow without bound. The next snapshot is a full one.
            self._core.state.in_flight.journal.clear()
            _release(self._answers)
            if then is not None:
                then()
            return
        self._saved_at = _now()
        state = self._core.state
        snapshot = take_full(state) if self._full_next else take_changes(state)
        self._full_next = False
        write = _Write(snapshot, durable, then, self._answers, self._saved_at)
        self._answers = []
        self._writes += 1
        if self._thread is None:
            self._finish(write, self._attempt(write))
        else:
            self._queue.append(write)
            self._waiting.set()

    async def _save_in_time(self) -> None:
        while True:
            await asyncio.sleep(min(FINISHED_S, self._interval_s))
            if self._queue:
                # The store is slower than the interval. More and more snapshots would wait for it,
                # and each batch would wait behind all of them.
                continue
            journal = self._core.state.in_flight.journal
            if journal.finished or _now() >= self._saved_at + self._interval_s:
                self._save()

    # --- writing -------------------------------------------------------------------------------

    async def _write_all(self) -> None:
        while True:
            await self._waiting.wait()
            self._waiting.clear()
            while self._queue:
                await self._write(self._queue.popleft())

    async def _write(self, write: _Write) -> None:
        self._writing = asyncio.ensure_future(self._written(write))
        # If the wait is cancelled, the thread continues, and close() waits for it.
        await asyncio.shield(self._writing)

    async def _written(self, write: _Write) -> None:
        if self.error is not None and not write.snapshot.full:
            self._finish(write, self.error)
            return
        self._finish(write, await self._call(lambda: self._attempt(write)))

    def _attempt(self, write: _Write) -> str | None:
        """Write a snapshot; returns why it failed, or None."""
        if self._store is None:
            return None
        try:
            self._store.save(write.snapshot, durable=write.durable)
        except AprilschedError as error:
            return str(error)
        return None

    def _finish(self, write: _Write, error: str | None) -> None:
        if error is not None:
            if self.error is None:
                log.error(
                    "the run continues and is not saved: %s (tried again every %g s)",
                    error,
                    _AGAIN_S,
                )
            self._full_next = True
            self._failed_at = _now()
        elif self.error is not None:
            log.warning("the run is saved again")
        self.error = error
        self._writes -= 1
        self._rest_until = _now() + _REST * (_now() - write.started_at)
        if write.then is not None:
            write.then()
        _release(write.waiting)
        self._save_answers()

    async def _call(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _resumed(state: SchedulerState) -> str:
    in_flight = state.in_flight
    tokens = sum(rollout.log.size for rollout in in_flight.rollouts.values())
    return (
        f"continues after {in_flight.counters.batches} batches with "
        f"{len(in_flight.rollouts)} rollouts of {tokens:,} tokens in flight, "
        f"at version {state.weights.versions.trainer}; "
        f"{len(state.delivery.redelivery)} batches are delivered again"
    )


def _release(waiting: list[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
    waiting.clear()


async def _taken(saved: asyncio.Future[None], late: str) -> None:
    done, _ = await asyncio.wait([saved], timeout=_SAFE_S)
    if not done:
        log.warning(late, _SAFE_S)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()
