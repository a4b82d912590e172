"""Tells the core once a second that time passes; without that it would not see that nothing comes.

A tick costs as much as there are engines in use. It is shown to no listener: a run's log would be
full of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aprilsched.coordinator.tasks import Tasks
from aprilsched.core.events import Event, Tick

__all__ = ["Heartbeat"]

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
