"""The circuit breaker of each engine: engines that are lost, and how they come back.

*Closed*: the engine is in use, or on standby for the next refit. *Open*: it was lost; nothing is
sent to it for a while. *Half open*: it is opened anew and has to pass the doctor's quick checks
(:mod:`aprilsched.doctor.quick`); whoever fails one is open again, and twice as long. Whoever passes
goes on standby, or straight into use if it has the fleet's version; which of the two is the core's
decision. An engine that is lost soon after it came back waits twice as long as the time before,
unless it is the last: then nothing is gained by sparing it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping

from aprilsched.config import SchedulerConfig
from aprilsched.coordinator.handback import HandBack
from aprilsched.coordinator.opening import examine
from aprilsched.coordinator.tasks import TaskKey, Tasks
from aprilsched.core.commands import LoseEngine
from aprilsched.core.events import EngineInfo, EngineJoined, Event
from aprilsched.engines.base import Engine
from aprilsched.errors import AprilschedError

__all__ = ["Readmission"]

log = logging.getLogger("aprilsched")

_FIRST_S = 1.0
_LAST_S = 60.0
"""Between two tries."""
_LONGEST_S = 900.0
"""Of an engine that was lost soon after it came back, again and again."""
_SOON_S = 300.0


class Readmission:
    """Watches the engines that are quarantined."""

    def __init__(
        self,
        *,
        engines: Mapping[str, Engine],
        feed: Callable[[Event], None],
        config: SchedulerConfig,
        hand_back: HandBack,
    ) -> None:
        self._engines = engines
        self._feed = feed
        self._config = config
        self._losses: Counter[str] = Counter()
        """In a row, each soon after the engine had come back."""
        self._back_at: dict[str, float] = {}
        self._tasks: Tasks | None = None
        self._hand_back = hand_back
        self._watching: dict[str, TaskKey] = {}
        self._begun = 0

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def lost(self, command: LoseEngine) -> None:
        """Open: wait for the engine to come back, unless it only stands by."""
        if not command.standby:
            self.expect(command.engine, last=command.last)

    def expect(self, engine: str, *, last: bool = False) -> None:
        """It does not work now, but is expected to."""
        if self._tasks is not None and engine not in self._watching:
            self._begun += 1
            key = self._watching[engine] = ("readmission", engine, self._begun)
            self._tasks.start(key, self._watch(engine, self._first_wait(engine, last=last)))

    def forget(self, engine: str) -> None:
        """It left the fleet and is not expected back."""
        key = self._watching.pop(engine, None)
        if self._tasks is not None and key is not None:
            self._tasks.cancel([key])

    def _first_wait(self, engine: str, *, last: bool) -> float:
        back_at, now = self._back_at.get(engine), asyncio.get_running_loop().time()
        if back_at is not None and now - back_at > _SOON_S:
            self._losses[engine] = 0
        self._losses[engine] += 1
        longest = _LAST_S if last else _LONGEST_S
        return min(longest, _FIRST_S * 2 ** (self._losses[engine] - 1))

    async def _watch(self, name: str, wait: float) -> None:
        longest = max(_LAST_S, wait)
        while True:
            await asyncio.sleep(wait)
            await self._hand_back.ended(name)
            try:
                info = await self._try(name)
            except (AprilschedError, TimeoutError) as error:
                log.debug("%s is not back: %s", name, error)
                wait = min(longest, 2 * wait)
            else:
                self._back_at[name] = asyncio.get_running_loop().time()
                del self._watching[name]
                self._feed(EngineJoined(info=info))
                return

    async def _try(self, name: str) -> EngineInfo:
        """Half open."""
        engine = self._engines[name]
        async with asyncio.timeout(self._config.control_timeout_s):
            # Anew: behind the same address may be another process with other capabilities.
            await engine.close()
            await engine.open()
        await self._hand_back.let_go_on(engine)
        async with asyncio.timeout(self._config.control_timeout_s):
            return await examine(engine, self._config)
