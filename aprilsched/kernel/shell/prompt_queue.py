"""A source of prompts for trainers that push them, for example one step's prompts at a time."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Self

from aprilsched.errors import ConfigError
from aprilsched.kernel.shell.prompts import TOGETHER_S
from aprilsched.kernel.values.bounds import AT_LEAST_0, check_range
from aprilsched.types import Prompt


class PromptQueue:
    """Prompts that are pushed during the run; pass it to the scheduler as ``prompts=``.

    While the queue is empty, the scheduler continues with the prompts that it has: it launches the
    pushed prompts, and the rest of a wave when more arrive. A batch that needs more groups than
    were pushed waits for :meth:`put` or :meth:`close`. Only one scheduler may use a queue.

    Any thread may call :meth:`put` and :meth:`close`, even before the scheduler is opened. The
    queue holds every pushed prompt until it is launched.

    A resumed run skips no prompts: push those that the previous run did not launch. It launched
    the first ``rollouts.state.prompts.cursor`` of all pushed prompts.

    Args:
        together_s: seconds without a new prompt after which the pushed prompts are launched.
            Prompts that are launched together delay the running requests by one shared prefill
            pass; 0 launches each prompt at once.

    Raises:
        ConfigError: if `together_s` is negative.
    """

    def __init__(self, *, together_s: float = TOGETHER_S) -> None:
        check_range(AT_LEAST_0, together_s=together_s)
        self.together_s = together_s
        self._prompts: deque[Prompt] = deque()
        self._closed = False
        self._lock = threading.Lock()
        self._waiter: asyncio.Future[None] | None = None
        """Done when a prompt was pushed or the queue was closed; None while no reader waits."""

    def put(self, *prompts: Prompt) -> None:
        """Push prompts behind those that wait.

        Raises:
            ConfigError: if the queue is closed; no prompt is pushed then.
        """
        with self._lock:
            if self._closed:
                raise ConfigError("the queue of prompts is closed; push before close().")
            self._prompts.extend(prompts)
            self._wake()

    def close(self) -> None:
        """Mark the end of the prompts. The rollouts in flight are then finished and delivered,
        perhaps in a smaller last batch. Closing again does nothing."""
        with self._lock:
            self._closed = True
            self._wake()

    def __len__(self) -> int:
        """Number of prompts that the scheduler has not taken yet."""
        return len(self._prompts)

    def skip(self, count: int) -> Self:
        """Return the source of a resumed run that launched `count` prompts: the queue itself.

        Launched prompts are not pushed again."""
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Prompt:
        """The next prompt; waits for one. A cancelled wait loses none."""
        while True:
            with self._lock:
                if self._prompts:
                    return self._prompts.popleft()
                if self._closed:
                    raise StopAsyncIteration
                waiter = self._waiter = asyncio.get_running_loop().create_future()
            await waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            return
        try:
            waiter.get_loop().call_soon_threadsafe(_resolve, waiter)
        except RuntimeError:
            # The event loop is closed, so no reader waits.
            return


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
