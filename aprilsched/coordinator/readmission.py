"""Engines that come back: a lost one is asked again and again, ever more rarely, until it works.

It then goes on standby, or straight into use if it has the fleet's version; which of the two is
the core's decision. An engine that is lost soon after it came back waits longer each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping

from aprilsched.config import SchedulerConfig
from aprilsched.coordinator.opening import examine
from aprilsched.coordinator.tasks import Tasks
from aprilsched.core.commands import LoseEngine
from aprilsched.core.events import EngineInfo, EngineJoined, Event
from aprilsched.engines.base import Engine
from aprilsched.errors import AprilschedError

__all__ = ["Readmission"]

log = logging.getLogger("aprilsched")

_FIRST_S = 1.0
_LAST_S = 60.0


class Readmission:
    """Watches the engines that are quarantined."""

    def __init__(
        self,
        *,
        engines: Mapping[str, Engine],
        feed: Callable[[Event], None],
        config: SchedulerConfig,
    ) -> None:
        self._engines = engines
        self._feed = feed
        self._config = config
        self._losses: Counter[str] = Counter()
        self._tasks: Tasks | None = None

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def lost(self, command: LoseEngine) -> None:
        """Wait for the engine to come back, unless it only stands by."""
        if not command.standby:
            self.expect(command.engine)

    def expect(self, engine: str) -> None:
        """It does not work now, but is expected to."""
        key = ("readmission", engine)
        if self._tasks is not None and not self._tasks.running(key):
            self._losses[engine] += 1
            self._tasks.start(key, self._watch(engine))

    def forget(self, engine: str) -> None:
        """It left the fleet and is not expected back."""
        if self._tasks is not None:
            self._tasks.cancel([("readmission", engine)])

    async def _watch(self, name: str) -> None:
        delay = min(_LAST_S, _FIRST_S * 2 ** (self._losses[name] - 1))
        while True:
            await asyncio.sleep(delay)
            try:
                info = await self._try(name)
            except (AprilschedError, TimeoutError) as error:
                log.debug("%s is not back: %s", name, error)
                delay = min(_LAST_S, 2 * delay)
            else:
                self._feed(EngineJoined(info=info))
                return

    async def _try(self, name: str) -> EngineInfo:
        engine = self._engines[name]
        async with asyncio.timeout(self._config.control_timeout_s):
            # Anew: behind the same address may be another process with other capabilities.
            await engine.close()
            await engine.open()
            return await examine(engine, self._config)
