"""Sends the core a Tick each second, and logs calls to engines that take long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from aprilsched.coordinator.tasks import Tasks
from aprilsched.core.messages.events import Event, Tick

__all__ = ["Heartbeat", "watched"]

log = logging.getLogger("aprilsched")

SLOW_CALL_S = 10.0
"""Interval in seconds at which a call without an answer is logged."""


@contextmanager
def watched(who: str, what: str, *, every_s: float = SLOW_CALL_S) -> Generator[None]:
    """Log a warning every `every_s` seconds while the block runs."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    def warn() -> None:
        nonlocal timer
        log.warning("%s has not answered %s for %.0f s", who, what, loop.time() - began)
        timer = loop.call_later(every_s, warn)

    timer = loop.call_later(every_s, warn)
    try:
        yield
    finally:
        timer.cancel()


_INTERVAL_S = 1.0


class Heartbeat:
    """Sends a Tick each second from the start of a session to its end."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed

    def start(self, tasks: Tasks) -> None:
        tasks.start("heartbeat", self._send_ticks())

    async def _send_ticks(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self._feed(Tick())
