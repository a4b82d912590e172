"""Tells the core each second that time passes, and logs the calls that stall."""

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


@contextmanager
def watched(who: str, what: str, *, every_s: float = SLOW_CALL_S) -> Generator[None]:
    """Log a line for every `every_s` seconds that the block takes."""
    loop = asyncio.get_running_loop()
    began = loop.time()

    def bark() -> None:
        nonlocal timer
        log.warning("%s has not answered %s for %.0f s", who, what, loop.time() - began)
        timer = loop.call_later(every_s, bark)

    timer = loop.call_later(every_s, bark)
    try:
        yield
    finally:
        timer.cancel()


_INTERVAL_S = 1.0


class Heartbeat:
    """Beats from the start of a session to its end."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        self._feed = feed

    def start(self, tasks: Tasks) -> None:
        tasks.start("heartbeat", self._beat())

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            self._feed(Tick())
