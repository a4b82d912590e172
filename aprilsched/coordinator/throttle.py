"""asyncio-throttle on the event loop's clock.

The library limits how many calls *start* in a period and reads ``time.monotonic``. Under a
virtual clock a second of that never passes while its waiter sleeps 10 virtual milliseconds at a
time, so the limiter here keeps its log on the loop's clock. It has one waiter, the dispatcher:
with several, late comers may overtake.
"""

from __future__ import annotations

import asyncio

from asyncio_throttle.throttler import Throttler

__all__ = ["LoopThrottler"]


class LoopThrottler(Throttler):
    """At most `rate_limit` entries per second of the running loop's clock."""

    def flush(self) -> None:
        horizon = asyncio.get_running_loop().time() - self.period
        while self._task_logs and self._task_logs[0] <= horizon:
            self._task_logs.popleft()

    async def acquire(self) -> None:
        self.flush()
        while len(self._task_logs) >= self.rate_limit:
            await asyncio.sleep(self.retry_interval)
            self.flush()
        self._task_logs.append(asyncio.get_running_loop().time())
