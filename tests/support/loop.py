"""An event loop whose clock stands still while its thread has no processor.

An engine in scaled wall time generates while the test that started it is not running: on a busy
machine a response is over before the test can pause it, and a timeout passes in which nothing could
happen. On this loop a second is one that the thread worked or waited.
"""

from __future__ import annotations

import asyncio
import selectors
import time

__all__ = ["PatientLoop"]


class _Selector(selectors.DefaultSelector):
    waited = 0.0
    """Seconds, of each wait no more than was asked for: waking up late is no waiting."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        begun = time.monotonic()
        found = super().select(timeout)
        took = time.monotonic() - begun
        self.waited += took if timeout is None else min(took, max(timeout, 0.0))
        return found


class PatientLoop(asyncio.SelectorEventLoop):
    """The standard loop with that clock; it belongs to the thread that runs it."""

    def __init__(self) -> None:
        self._waiting = _Selector()
        super().__init__(self._waiting)

    def time(self) -> float:
        """Seconds of work and of waiting."""
        return time.thread_time() + self._waiting.waited
