"""Saving: cuts of the core into a store, at intervals, at ends, and before anything is handed over.

- A batch is handed over when the store has it, so that what the trainer saw is never forgotten.
- What came to its end is saved within :data:`FINISHED_S`, tokens within the interval.
- A store that fails does not end the run: it goes on unsaved, says so once, and from time to time
  everything is tried to be saved anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from aprilsched.coordinator.tasks import Tasks
from aprilsched.core.saving.cut import take_anew, take_changes
from aprilsched.core.saving.saved import Cut, Saved
from aprilsched.core.state import SchedulerState
from aprilsched.errors import AprilschedError
from aprilsched.store.base import Store

__all__ = ["FINISHED_S", "Recorder"]

log = logging.getLogger("aprilsched")

T = TypeVar("T")

FINISHED_S = 0.5
_AGAIN_S = 10.0
_CLOSE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Write:
    cut: Cut
    durable: bool
    then: Callable[[], None] | None


class Recorder:
    """Keeps a store up to date with a scheduler.

    Args:
        store: opened and closed here.
        state: the scheduler's.
        interval_s: seconds after which new tokens are saved.
    """

    def __init__(self, store: Store, state: SchedulerState, *, interval_s: float) -> None:
        self.error: str | None = None
        """Why the run is not saved now; None while it is."""
        self._store = store
        self._state = state
        self._interval_s = interval_s
        self._thread = None if store.inline else ThreadPoolExecutor(1, "aprilsched-store")
        self._queue: deque[_Write] = deque()
        self._waiting = asyncio.Event()
        self._writing: asyncio.Future[None] | None = None
        self._soon = False
        self._whole = False
        self._saved_at = 0.0
        self._failed_at = 0.0

    async def open(self) -> Saved | None:
        """What was saved before.

        Raises:
            StoreError: if the store cannot be used.
        """
        saved = await self._call(self._store.open)
        self._state.book.journal.active = True
        return saved

    def begin_anew(self) -> None:
        """What the store holds is not what the scheduler goes on from: it is replaced."""
        self._whole = True

    def start(self, tasks: Tasks) -> None:
        self._saved_at = _now()
        tasks.start("recorder", self._save_in_time())
        tasks.start("store", self._write_all())

    # --- saving --------------------------------------------------------------------------------

    def before(self, hand_over: Callable[[], None]) -> None:
        """Save everything up to now, then `hand_over`."""
        self._save(durable=True, then=hand_over)

    def save_soon(self) -> None:
        """Something is decided that must not be forgotten."""
        if not self._soon:
            self._soon = True
            # Not at once: the event in work may have others behind it that belong to it.
            asyncio.get_running_loop().call_soon(self._save)

    async def close(self) -> None:
        """Save the end, and let go of the store."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                if self._writing is not None:
                    await asyncio.wait([self._writing])
                self._save(last=True)
                while self._queue:
                    await self._write(self._queue.popleft())
                await self._call(self._store.close)
        except TimeoutError:
            log.error("the store did not take the last cut within %g s", _CLOSE_S)
        except AprilschedError as error:
            log.error("the store could not be closed: %s", error)
        finally:
            if self._thread is not None:
                self._thread.shutdown(wait=False)

    def _save(
        self,
        *,
        durable: bool = False,
        then: Callable[[], None] | None = None,
        last: bool = False,
    ) -> None:
        self._soon = False
        if self.error is not None and not last and _now() < self._failed_at + _AGAIN_S:
            # What is noted meanwhile would grow without bound; the next cut is a whole one.
            self._state.book.journal.clear()
            if then is not None:
                then()
            return
        self._saved_at = _now()
        cut = take_anew(self._state) if self._whole else take_changes(self._state)
        self._whole = False
        write = _Write(cut, durable, then)
        if self._thread is None:
            self._finish(write, self._attempt(write))
        else:
            self._queue.append(write)
            self._waiting.set()

    async def _save_in_time(self) -> None:
        while True:
            await asyncio.sleep(min(FINISHED_S, self._interval_s))
            if self._queue:
                # The store is slower than the interval: cuts that wait for it would become ever
                # more, and each batch would wait behind all of them.
                continue
            journal = self._state.book.journal
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
        # A cancelled wait leaves the thread at its work: close() waits for it.
        await asyncio.shield(self._writing)

    async def _written(self, write: _Write) -> None:
        if self.error is not None and not write.cut.whole:
            self._finish(write, self.error)
            return
        self._finish(write, await self._call(lambda: self._attempt(write)))

    def _attempt(self, write: _Write) -> str | None:
        """Why it failed; None if it did not."""
        try:
            self._store.save(write.cut, durable=write.durable)
        except AprilschedError as error:
            return str(error)
        return None

    def _finish(self, write: _Write, error: str | None) -> None:
        if error is not None:
            if self.error is None:
                log.error(
                    "the run goes on and is not saved: %s (tried again every %g s)",
                    error,
                    _AGAIN_S,
                )
            self._whole = True
            self._failed_at = _now()
        elif self.error is not None:
            log.warning("the run is saved again")
        self.error = error
        if write.then is not None:
            write.then()

    async def _call(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _now() -> float:
    return asyncio.get_running_loop().time()
