"""Engines that join and leave while the scheduler is open, where the fleet tells of them.

Who joins has shown that it generates before the core hears of it; who leaves is lost, its rollouts
go on elsewhere with their tokens, and nobody waits for it to come back. It is handed back running,
and closed. Who joins again before that waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from aprilsched.config import SchedulerConfig
from aprilsched.coordinator.handback import HandBack
from aprilsched.coordinator.opening import examine
from aprilsched.coordinator.readmission import Readmission
from aprilsched.coordinator.tasks import Tasks
from aprilsched.core.events import EngineJoined, EngineLost, Event
from aprilsched.engines.base import Engine, Fleet, WatchesMembership
from aprilsched.errors import AprilschedError

__all__ = ["Membership"]

log = logging.getLogger("aprilsched")


class Membership:
    """Keeps `engines` as the fleet has them."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        engines: dict[str, Engine],
        feed: Callable[[Event], None],
        config: SchedulerConfig,
        readmission: Readmission,
        hand_back: HandBack,
    ) -> None:
        self._fleet = fleet
        self._engines = engines
        self._feed = feed
        self._config = config
        self._readmission = readmission
        self._hand_back = hand_back

    def start(self, tasks: Tasks) -> None:
        if isinstance(self._fleet, WatchesMembership):
            tasks.start("membership", self._watch(self._fleet))

    async def _watch(self, fleet: WatchesMembership) -> None:
        async with aclosing(fleet.watch()) as changes:
            async for change in changes:
                for name in change.left:
                    self._leave(name)
                for engine in change.joined:
                    await self._join(engine)

    def _leave(self, name: str) -> None:
        self._feed(EngineLost(engine=name, cause="it left the fleet"))
        self._readmission.forget(name)
        engine = self._engines.pop(name, None)
        if engine is not None:
            # The core may have lost it before, and it may have been left paused then.
            self._hand_back.begin(engine)

    async def _join(self, engine: Engine) -> None:
        self._engines[engine.name] = engine
        if self._hand_back.under_way(engine.name):
            self._readmission.expect(engine.name)
            return
        try:
            # One that holds its token back must not keep the fleet's other changes waiting.
            async with asyncio.timeout(self._config.control_timeout_s):
                info = await examine(engine, self._config)
        except (AprilschedError, TimeoutError) as error:
            log.warning("engine %s joined but does not work yet: %s", engine.name, error)
            self._readmission.expect(engine.name)
        else:
            self._feed(EngineJoined(info=info))
