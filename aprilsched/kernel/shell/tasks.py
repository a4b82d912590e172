"""Runs tasks with keys in one task group, for all parts of a session.

Invariants: every task is referenced and can be cancelled by its key. Two tasks never have the same
key at the same time. A task that was cancelled from outside ends the group with an error, because
its result would be awaited forever.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.core.messages.events import Event
from aprilsched.kernel.engines.base import Engine

TaskKey: TypeAlias = str | tuple[Any, ...]


class Tasks:
    """The tasks of a group by key. A task that raises ends the group, as in asyncio.TaskGroup.

    Tasks do not run before :meth:`run_in` sets the group, nor after the group ends."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._owner: asyncio.Task[Any] | None = None
        self._count = 0
        self._tasks: dict[TaskKey, asyncio.Task[None]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        self._ending = False

    def run_in(self, group: asyncio.TaskGroup) -> None:
        """Run the tasks that are started in `group`, which the current task owns."""
        self._group = group
        self._owner = asyncio.current_task()

    def start(self, key: TaskKey, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` under an unused key, or under the key of the calling task, which must end.

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
            # A task has failed, and the owner has not run since. If this raised, a trainer that
            # requests an update now would get asyncio's error instead of the session's.
            work.close()
            return
        self._tasks[key] = task
        task.add_done_callback(lambda ended: self._end(key, ended))

    def start_another(self, kind: tuple[Any, ...], work: Coroutine[Any, Any, None]) -> TaskKey:
        """Start `work` under a new key that starts with `kind`, and return the key."""
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
        """Cancel every task whose key is a tuple that starts with `kind`, except those in `but`."""
        spared = set(but)
        self.cancel([key for key in self.of_kind(kind) if key not in spared])

    def of_kind(self, *kinds: tuple[Any, ...]) -> list[TaskKey]:
        """Return the running tasks' keys that are tuples and start with one of `kinds`."""
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
    """The objects that the parts of one session share."""

    config: SchedulerConfig
    engines: dict[str, Engine]
    """The engines of the fleet, by name."""
    feed: Callable[[Event], None]
    """Passes an event to the core."""
    tasks: Tasks
    process: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Random name of this process of the run. A run id may belong to another training, and a
    resumed run may train a version again that the previous process left on an engine."""


class Part:
    """A part of a session."""

    def __init__(self, shell: Shell) -> None:
        self._config = shell.config
        self._engines = shell.engines
        self._feed = shell.feed
        self._tasks = shell.tasks
        self._process = shell.process
