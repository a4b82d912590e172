"""Lets engines join and leave a running scheduler, readmits engines that were lost, and watches all
of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing

from aprilsched.errors import AprilschedError
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.messages.events import EngineInfo, EngineLost
from aprilsched.kernel.engines.base import Engine, Fleet, WatchesMembership
from aprilsched.kernel.shell.handback import HandBack
from aprilsched.kernel.shell.opening import examine
from aprilsched.kernel.shell.sharing import claim
from aprilsched.kernel.shell.tasks import Part, Shell, TaskKey

log = logging.getLogger("aprilsched")


class Membership(Part):
    """Keeps the session's engines equal to the fleet's."""

    def __init__(
        self,
        shell: Shell,
        *,
        fleet: Fleet,
        readmission: Readmission,
        hand_back: HandBack,
        join: Callable[[EngineInfo], None],
    ) -> None:
        super().__init__(shell)
        self._joined = join
        self._fleet = fleet
        self._readmission = readmission
        self._hand_back = hand_back

    def start(self) -> None:
        if isinstance(self._fleet, WatchesMembership):
            self._tasks.start("membership", self._watch(self._fleet))

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
            # The core may have lost the engine before, and the engine may be paused since then.
            self._hand_back.start(engine)

    async def _join(self, engine: Engine) -> None:
        self._engines[engine.name] = engine
        if engine.name in self._hand_back.pending:
            self._readmission.expect(engine.name)
            return
        try:
            # An engine that generates no token must not delay other changes of the fleet.
            async with asyncio.timeout(self._config.timeouts.control_s):
                await claim(engine)
                info = await examine(engine, self._config, self._engines.values(), self._process)
        except (AprilschedError, TimeoutError) as error:
            log.warning("engine %s joined but does not work yet: %s", engine.name, error)
            self._readmission.expect(engine.name)
        else:
            self._joined(info)


_FIRST_S = 1.0
"""Seconds before the first try to readmit an engine; each further wait is twice as long."""
_LAST_S = 60.0
"""Longest wait between two tries, in seconds."""
_LONGEST_S = 900.0
"""Longest wait for an engine that is repeatedly lost soon after its readmission, in seconds."""
_SOON_S = 300.0
"""Seconds after a readmission within which a loss counts as soon."""


class Readmission(Part):
    """Waits for quarantined engines to work again, and readmits them.

    This is a circuit breaker for each engine: a lost engine is open, a try is half open.
    """

    def __init__(
        self, shell: Shell, hand_back: HandBack, join: Callable[[EngineInfo], None]
    ) -> None:
        super().__init__(shell)
        self._join = join
        self._losses: Counter[str] = Counter()
        """Number of consecutive losses soon after a readmission, by engine."""
        self._back_at: dict[str, float] = {}
        self._hand_back = hand_back
        self._watching: dict[str, TaskKey] = {}

    def lost(self, command: facts.EngineLost) -> None:
        """Wait for a lost engine to recover, unless it is on standby."""
        if not command.standby:
            self.expect(command.engine, last=command.last)

    def expect(self, engine: str, *, last: bool = False) -> None:
        """Wait for an engine that does not work now and is expected to recover."""
        if engine not in self._watching:
            work = self._watch(engine, self._first_wait(engine, last=last))
            self._watching[engine] = self._tasks.start_another(("readmission", engine), work)

    def forget(self, engine: str) -> None:
        """Stop waiting for an engine that left the fleet."""
        key = self._watching.pop(engine, None)
        if key is not None:
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
                self._join(info)
                return

    async def _try(self, name: str) -> EngineInfo:
        """Try once to readmit an engine, and return its description for the core."""
        engine = self._engines[name]
        async with asyncio.timeout(self._config.timeouts.control_s):
            # Opened again, because another process with other capabilities may be at the address.
            await engine.close()
            await engine.open()
            await claim(engine)
        await self._hand_back.let_go_on(engine)
        async with asyncio.timeout(self._config.timeouts.control_s):
            return await examine(engine, self._config, self._engines.values(), self._process)
