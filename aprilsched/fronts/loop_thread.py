"""An event loop in a thread of its own, for code that is called from outside asyncio.

The blocking scheduler and the test server of :mod:`aprilsched.testing` run on one each.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading


class LoopThread:
    """A daemon thread that runs an event loop from the constructor until :meth:`stop`.

    Args:
        name: the name of the thread, for people who look at a process.

    Attributes:
        loop: the event loop, which runs. Other threads give it work by its thread-safe calls.
    """

    def __init__(self, name: str) -> None:
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._thread = threading.Thread(target=_run, args=(started,), name=name, daemon=True)
        self._thread.start()
        self.loop = started.result()

    @property
    def current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """Stop the loop, cancel its tasks, and wait until the thread has ended."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


def _run(started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    # The runner cancels the tasks that are left and closes the loop, whatever stopped it.
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        started.set_result(loop)
        loop.run_forever()
