"""Runs tasks with keys in one task group, for all parts of a session.

Invariants: every task is referenced and can be cancelled by its key. Two tasks never have the same
key at the same time. A task that was cancelled from outside ends the group with an error, because
its result would be awaited forever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from aprilsched.errors import ConfigError, InvariantViolation
from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.core.messages.commands import DeliverEvaluation
from aprilsched.kernel.core.messages.events import Event
from aprilsched.kernel.core.messages.facts import SleepBegun, SleepEnded, UpdateFinished
from aprilsched.kernel.engines.base import Engine
from aprilsched.types import Batch

TaskKey: TypeAlias = str | tuple[Any, ...]


class Tasks:
    """The tasks of a group by key. A task that raises ends the group, as in asyncio.TaskGroup.
    Before :meth:`run_in` there is no group, and nothing that is started runs; nor does it when the
    group ends."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._owner: asyncio.Task[Any] | None = None
        self._count = 0
        self._tasks: dict[TaskKey, asyncio.Task[None]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        self._ending = False

    def run_in(self, group: asyncio.TaskGroup) -> None:
        """Run what is started in `group`, which the current task owns."""
        self._group = group
        self._owner = asyncio.current_task()

    def start(self, key: TaskKey, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` under a key that is not in use, or is that of the task that starts it and
        is about to end.

        Raises:
            InvariantViolation: if the key is in use, because the older task could then not be
                cancelled.
        """
        if self._group is None:
            work.close()
            return
        other = self._tasks.get(key)
        if other is not None and other is not asyncio.current_task() and not other.done():
            work.close()
            raise InvariantViolation(f"a task named {key} runs already")
        try:
            task = self._group.create_task(work)
        except RuntimeError:
            # A task has failed, and the owner has not run since. A trainer that asked for an update
            # in between got asyncio's words instead of the error that ends the session.
            work.close()
            return
        self._tasks[key] = task
        task.add_done_callback(lambda ended: self._end(key, ended))

    def start_another(self, kind: tuple[Any, ...], work: Coroutine[Any, Any, None]) -> TaskKey:
        """Start `work` under a key that begins with `kind` and was not used before; returns it."""
        self._count += 1
        key = (*kind, self._count)
        self.start(key, work)
        return key

    def running(self, key: TaskKey) -> bool:
        return key in self._tasks

    def fail(self, error: BaseException) -> None:
        """End the whole group with `error`, which was raised outside of the group's tasks."""
        if self._ending or self._group is None:
            return
        self._ending = True
        self.start("failure", _raise(error))

    def cancel(self, keys: Iterable[TaskKey]) -> None:
        for key in keys:
            task = self._tasks.get(key)
            if task is not None:
                self._cancelled.add(task)
                task.cancel()

    def cancel_kind(self, kind: tuple[Any, ...], *, but: Iterable[TaskKey] = ()) -> None:
        """Cancel every task whose key is a tuple that begins with `kind`, except those in `but`."""
        spared = set(but)
        self.cancel([key for key in self.of_kind(kind) if key not in spared])

    def of_kind(self, *kinds: tuple[Any, ...]) -> list[TaskKey]:
        """Keys of the running tasks that are tuples and begin with one of `kinds`."""
        return [
            key
            for key in self._tasks
            if isinstance(key, tuple) and any(key[: len(kind)] == kind for kind in kinds)
        ]

    async def ended(self, keys: Iterable[TaskKey], *, within: float | None = None) -> None:
        """Wait until these tasks have ended, with or without success, at most `within` seconds."""
        tasks = [self._tasks[key] for key in keys if key in self._tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=within)

    def cancel_all(self) -> None:
        """Cancel every task, because the group ends."""
        self._ending = True
        for task in list(self._tasks.values()):
            task.cancel()

    def _end(self, key: TaskKey, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        expected = task in self._cancelled
        self._cancelled.discard(task)
        # The whole group is cancelled with its owner, and when the first task raises.
        ending = self._ending or (self._owner is not None and self._owner.cancelling() > 0)
        if not task.cancelled():
            self._ending = self._ending or task.exception() is not None
        elif not expected and not ending:
            self.fail(InvariantViolation(f"the task {key} was cancelled from outside"))


async def _raise(error: BaseException) -> None:
    raise error


@dataclass(frozen=True, kw_only=True, slots=True)
class Shell:
    """What the parts of one session share."""

    config: SchedulerConfig
    engines: dict[str, Engine]
    """The engines of the fleet, by name."""
    feed: Callable[[Event], None]
    """Gives an event to the core."""
    tasks: Tasks


class Part:
    """A part of a session."""

    def __init__(self, shell: Shell) -> None:
        self._config = shell.config
        self._engines = shell.engines
        self._feed = shell.feed
        self._tasks = shell.tasks


# --- waits ---------------------------------------------------------------------------------------

# Holds the futures that the trainer's calls wait for: a batch, an update, a sleep, evaluations.
#
# A batch is only offered here. The trainer's call takes it when the call continues. So a call that
# is cancelled at any moment has taken nothing, and the batch stays available for the next call.


class Waits:
    """Futures of the trainer's open calls."""

    def __init__(self) -> None:
        self.offer: Batch | None = None
        """The batch that may be taken; None if there is none. If there is a store, it has saved
        this batch."""
        self._handing: asyncio.Future[None] | None = None
        """Done when it is known whether the trainer has taken the offer; None while no offer is on
        its way."""
        self._batch: asyncio.Future[None] | None = None
        self.update: asyncio.Future[UpdateFinished] | None = None
        """The wait for the latest update, even if its caller was cancelled."""
        self._evaluations: dict[int, asyncio.Future[Batch]] = {}
        self._sleep: asyncio.Future[None] | None = None
        self._failure: BaseException | None = None

    # --- an offer on its way -------------------------------------------------------------------

    def begin_hand_over(self) -> None:
        """The offer is on its way to a thread or process, and must not be withdrawn meanwhile."""
        # It does not raise the failure of a session that ended just now: the trainer's call has the
        # batch already.
        self._handing = asyncio.get_running_loop().create_future()

    def end_hand_over(self) -> None:
        """The trainer has the offer, or does not get it. Calling it again does nothing."""
        handing, self._handing = self._handing, None
        if handing is not None and not handing.done():
            handing.set_result(None)

    async def until_handed_over(self) -> None:
        """Wait until no offer is on its way."""
        while self._handing is not None:
            await asyncio.shield(self._handing)
            self.raise_failure()

    # --- waiting -------------------------------------------------------------------------------

    @property
    def batch_requested(self) -> bool:
        return self._batch is not None and not self._batch.done()

    async def next_offer(
        self, request: Callable[[], None], gave_up: Callable[[BaseException], None]
    ) -> Batch:
        """Wait until a batch is offered. One call waits at a time: another one that took the offer
        in between got the same batch.

        Args:
            request: asks for the batch.
            gave_up: is told what has ended the wait without a batch.

        Raises:
            ConfigError: if another call is waiting.
        """
        if self._batch is not None:
            raise ConfigError(
                "another next_batch() call is waiting already; await it before the next call."
            )
        self._batch = future = self._check().create_future()
        request()
        try:
            while self.offer is None:
                await future
                if self.offer is None:
                    # An update came between the offer and this line, so the offer was withdrawn.
                    self._batch = future = self._check().create_future()
        except BaseException as error:
            gave_up(error)
            raise
        finally:
            future.cancel()
            self._batch = None
        return self.offer

    def for_update(self) -> asyncio.Future[UpdateFinished]:
        self.update = self._check().create_future()
        return self.update

    def for_sleep(self) -> asyncio.Future[None]:
        """A future that is done when the engines are asleep, or are awake again."""
        self._sleep = self._check().create_future()
        return self._sleep

    def for_evaluation(self, evaluation_id: int) -> asyncio.Future[Batch]:
        future: asyncio.Future[Batch] = self._check().create_future()
        self._evaluations[evaluation_id] = future
        return future

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    # --- commands ------------------------------------------------------------------------------

    def show(self, batch: Batch) -> None:
        """Offer a batch to the trainer."""
        self.offer = batch
        if self._batch is not None and not self._batch.done():
            self._batch.set_result(None)

    def withdraw(self, _: object) -> None:
        """Withdraw the offer of a batch."""
        self.offer = None

    def finish_update(self, command: UpdateFinished) -> None:
        if self.update is not None and not self.update.done():
            self.update.set_result(command)

    def finish_sleep(self, _: SleepBegun | SleepEnded) -> None:
        if self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    def deliver_evaluation(self, command: DeliverEvaluation) -> None:
        future = self._evaluations.pop(command.evaluation_id, None)
        if future is not None and not future.done():
            future.set_result(command.batch)

    def forget_evaluation(self, evaluation_id: int) -> None:
        """Drop the future of an evaluation whose caller was cancelled."""
        self._evaluations.pop(evaluation_id, None)

    def refuse(self, error: BaseException, *, batch: bool, evaluations: Iterable[int]) -> None:
        """Raise `error` in the calls that wait for these; later calls work again."""
        futures = [self._evaluations.pop(evaluation, None) for evaluation in evaluations]
        for future in (self._batch if batch else None, *futures):
            fail_future(future, error)

    def fail(self, error: BaseException) -> None:
        """Raise `error` in every call that waits now or later, because the session has ended."""
        self._failure = self._failure or error
        for future in (self._batch, self.update, self._sleep, *self._evaluations.values()):
            fail_future(future, error)
        self.end_hand_over()

    def _check(self) -> asyncio.AbstractEventLoop:
        self.raise_failure()
        return asyncio.get_running_loop()


def fail_future(future: asyncio.Future[Any] | None, error: BaseException) -> None:
    """Let what waits for the future end with the error, if it still waits."""
    if future is not None and not future.done():
        future.set_exception(error)
        # Marks the error as retrieved, because a cancelled waiter does not look at it.
        future.exception()


# --- watchdog ------------------------------------------------------------------------------------

# Logs calls to engines that take long.

log = logging.getLogger("aprilsched")

SLOW_CALL_S = 10.0
"""Interval in seconds at which a call without an answer is logged."""


@contextmanager
def watched(who: str, what: str, *, every_s: float = SLOW_CALL_S) -> Generator[None]:
    """Log a warning every `every_s` seconds while the block runs."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    def warn() -> None:
        nonlocal timer
        log.warning("%s has not answered %s for %.0f s", who, what, loop.time() - began)
        timer = loop.call_later(every_s, warn)

    timer = loop.call_later(every_s, warn)
    try:
        yield
    finally:
        timer.cancel()
