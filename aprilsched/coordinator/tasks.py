"""Runs tasks with keys in one task group, for all parts of a session.

Invariants: every task is referenced and can be cancelled by its key. Two tasks never have the same
key at the same time. A task that was cancelled from outside ends the group with an error, because
its result would be awaited forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeAlias

from aprilsched.errors import InvariantViolation

__all__ = ["TaskKey", "Tasks"]

TaskKey: TypeAlias = str | tuple[Any, ...]


class Tasks:
    """The tasks of `group` by key. A task that raises ends the group, as in asyncio.TaskGroup.

    Make it in the task that owns the group, inside the group's block.
    """

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._owner = asyncio.current_task()
        self._tasks: dict[TaskKey, asyncio.Task[None]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        self._ending = False

    def start(self, key: TaskKey, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` under a key that is not in use.

        Raises:
            InvariantViolation: if the key is in use, because the older task could then not be
                cancelled.
        """
        if key in self._tasks:
            work.close()
            raise InvariantViolation(f"a task named {key} runs already")
        task = self._group.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda ended: self._end(key, ended))

    def running(self, key: TaskKey) -> bool:
        return key in self._tasks

    def fail(self, error: BaseException) -> None:
        """End the whole group with `error`, which was raised outside of the group's tasks."""
        if self._ending:
            return
        self._ending = True
        work = _raise(error)
        try:
            self._group.create_task(work)
        except RuntimeError:
            # The group has ended already.
            work.close()

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
