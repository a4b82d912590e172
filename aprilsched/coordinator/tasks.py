"""Named tasks inside one task group: every task is referenced, and can be cancelled by its key."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable, Iterable
from typing import Any

__all__ = ["Tasks"]


class Tasks:
    """Tasks by key. A task that raises ends the whole group, as asyncio.TaskGroup does."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    def start(self, key: Hashable, work: Coroutine[Any, Any, None]) -> None:
        """Start `work` under a key that is not in use."""
        task = self._group.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def running(self, key: Hashable) -> bool:
        return key in self._tasks

    def cancel(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            task = self._tasks.get(key)
            if task is not None:
                task.cancel()

    def cancel_all(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
