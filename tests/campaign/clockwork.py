"""Replaces threads on a virtual clock, so that work in executors takes virtual time.

A looptime clock does not wait for threads, so a run with real threads would differ each time. Here
`run_in_executor` of a loop is replaced. Each executor keeps its number of workers. A piece of work
takes the time that `seconds` gives for the executor's threads, and its function runs at the end of
that time, on the loop. Results and errors pass through a concurrent future as in asyncio, with the
same special cases (StopIteration).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Workers:
    free: int
    queue: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]])


class VirtualThreads:
    """Takes the place of the executors of one loop.

    Args:
        seconds: how long a piece of work takes that is given to threads of this name.
    """

    def __init__(self, seconds: Callable[[str], float]) -> None:
        self._seconds = seconds
        self._workers: dict[int, _Workers] = {}
        self._executors: list[Any] = []
        self.open = 0
        """Work that is not done yet."""

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the executor work of `loop` on these threads from now on."""
        loop.run_in_executor = self._run  # type: ignore[method-assign]

    def _run(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: Future[Any] = Future()
        workers = self._workers_of(executor)
        context = contextvars.copy_context()
        seconds = self._seconds(getattr(executor, "_thread_name_prefix", ""))

        def start() -> None:
            if not future.set_running_or_notify_cancel():
                self.open -= 1
                return  # cancelled while it waited for a worker
            workers.free -= 1
            loop.call_later(seconds, end)

        def end() -> None:
            self.open -= 1
            workers.free += 1
            try:
                result = context.run(function, *args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            while workers.queue and workers.free:
                workers.queue.popleft()()

        self.open += 1
        if workers.free:
            start()
        else:
            workers.queue.append(start)
        return asyncio.wrap_future(future, loop=loop)

    def _workers_of(self, executor: Any) -> _Workers:
        key = id(executor)
        if key not in self._workers:
            self._executors.append(executor)  # otherwise another object could get its id
            self._workers[key] = _Workers(getattr(executor, "_max_workers", 32))
        return self._workers[key]
