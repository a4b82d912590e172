"""Named tasks inside one task group: every task is referenced, and can be cancelled by its key."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeAlias

__all__ = ["TaskKey", "Tasks"]

TaskKey: TypeAlias = str | tuple[Any, ...]


class Tasks:
    """Tasks by key. A task that raises ends the whole group, as asyncio.TaskGroup does."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: dict[TaskKey, asyncio.Task[None]] = {}

    def start(self, key: TaskKey, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` under a key that is not in use."""
        task = self._group.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def running(self, key: TaskKey) -> bool:
        return key in self._tasks

    def cancel(self, keys: Iterable[TaskKey]) -> None:
        for key in keys:
            task = self._tasks.get(key)
            if task is not None:
                task.cancel()

    def cancel_kind(self, kind: tuple[str, ...]) -> None:
        """Cancel every task whose key is a tuple that begins with `kind`."""
        length = len(kind)
        self.cancel([k for k in self._tasks if isinstance(k, tuple) and k[:length] == kind])

    def cancel_all(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
