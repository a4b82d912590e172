"""An event loop whose clock stands still while its thread has no processor.

On a busy machine, an engine in scaled wall time generates while the test that started it does not
run. Then a response ends before the test can pause it, and a timeout passes in which nothing could
happen. On this loop, only the time in which the thread worked or waited counts.
"""

from __future__ import annotations

import asyncio
import selectors
import time


class _Selector(selectors.DefaultSelector):
    waited = 0.0
    """Sum of the seconds waited. Of each wait, at most the requested time counts, because the rest
    is a late wake-up."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        started = time.monotonic()
        found = super().select(timeout)
        took = time.monotonic() - started
        self.waited += took if timeout is None else min(took, max(timeout, 0.0))
        return found


class PatientLoop(asyncio.SelectorEventLoop):
    """The standard loop with this clock. It must run in the thread that made it."""

    def __init__(self) -> None:
        self._waiting = _Selector()
        super().__init__(self._waiting)

    def time(self) -> float:
        """Seconds of work and of waiting."""
        return time.thread_time() + self._waiting.waited
