"""Lets engines join and leave a running scheduler, readmits engines that were lost, and watches all
of them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from datetime import datetime, timedelta

from aprilsched.errors import (
    AprilschedError,
    EngineError,
    FleetLost,
    InconsistentWeights,
    RefitError,
)
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.messages.events import EngineInfo, EngineJoined, EngineLost
from aprilsched.kernel.engines.base import (
    CLAIM_INTERVAL_S,
    Claimable,
    Engine,
    Fleet,
    ReportsLoad,
    TellsPause,
    WatchesMembership,
)
from aprilsched.kernel.shell.handback import HandBack
from aprilsched.kernel.shell.opening import claim, examine
from aprilsched.kernel.shell.tasks import Part, Shell, TaskKey

log = logging.getLogger("aprilsched")


class Membership(Part):
    """Keeps the engines of the session equal to those of the fleet."""

    def __init__(
        self, shell: Shell, *, fleet: Fleet, readmission: Readmission, hand_back: HandBack
    ) -> None:
        super().__init__(shell)
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
            self._hand_back.begin(engine)

    async def _join(self, engine: Engine) -> None:
        self._engines[engine.name] = engine
        if engine.name in self._hand_back.pending:
            self._readmission.expect(engine.name)
            return
        try:
            # An engine that gives no token must not delay the other changes of the fleet.
            async with asyncio.timeout(self._config.timeouts.control_s):
                await claim(engine)
                info = await examine(engine, self._config, self._engines.values())
        except (AprilschedError, TimeoutError) as error:
            log.warning("engine %s joined but does not work yet: %s", engine.name, error)
            self._readmission.expect(engine.name)
        else:
            self._feed(EngineJoined(info=info))


_FIRST_S = 1.0
"""Seconds before the first try to readmit an engine; each further wait is twice as long."""
_LAST_S = 60.0
"""Longest wait between two tries, in seconds."""
_LONGEST_S = 900.0
"""Longest wait for an engine that is lost again and again soon after it came back, in seconds."""
_SOON_S = 300.0
"""An engine that is lost within these seconds after it came back is lost soon."""


class Readmission(Part):
    """Waits for quarantined engines to work again, and readmits them.

    This is a circuit breaker for each engine: a lost engine is open, a try is half open.
    """

    def __init__(self, shell: Shell, hand_back: HandBack) -> None:
        super().__init__(shell)
        self._losses: Counter[str] = Counter()
        """Number of losses in a row, each soon after the engine had come back, by engine."""
        self._back_at: dict[str, float] = {}
        self._hand_back = hand_back
        self._watching: dict[str, TaskKey] = {}

    def lost(self, command: facts.EngineLost) -> None:
        """Wait for a lost engine to come back, unless it is on standby."""
        if not command.standby:
            self.expect(command.engine, last=command.last)

    def expect(self, engine: str, *, last: bool = False) -> None:
        """Wait for an engine that does not work now and is expected to come back."""
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
                self._feed(EngineJoined(info=info))
                return

    async def _try(self, name: str) -> EngineInfo:
        """Try once to readmit an engine; returns what the core must know of it."""
        engine = self._engines[name]
        async with asyncio.timeout(self._config.timeouts.control_s):
            # Opened again, because another process with other capabilities may be at the address.
            await engine.close()
            await engine.open()
            await claim(engine)
        await self._hand_back.let_go_on(engine)
        async with asyncio.timeout(self._config.timeouts.control_s):
            return await examine(engine, self._config, self._engines.values())


# --- watches --------------------------------------------------------------------------------------

# Watches all engines: their versions, where somebody else moves the weights, and their KV pools,
# where requests move from full ones.

_INTERVAL_S = 1.0
_ANSWER_S = 10.0
"""Seconds that an engine has for an answer. One that does not answer is no matter of this watch."""
_AT_ONCE = 32


class Watch(Part):
    """Asks every engine something once a second, and tells the core the answers."""

    def __init__(self, shell: Shell, ask: Callable[[Engine], Awaitable[ev.Event | None]]) -> None:
        super().__init__(shell)
        self._ask = ask
        self._limit = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            async with asyncio.TaskGroup() as group:
                for engine in list(self._engines.values()):
                    group.create_task(self._look(engine))

    async def _look(self, engine: Engine) -> None:
        async with self._limit:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    seen = await self._ask(engine)
                if seen is not None:
                    self._feed(seen)


async def ask_version(engine: Engine, *, silent: bool) -> ev.VersionSeen:
    """Ask an engine for its version, and whether it is paused if it is `silent`.

    The labels on tokens are not enough: an engine without requests sends none, and a trainer that
    waits for the next version launches none.
    """
    paused = None
    if isinstance(engine, TellsPause) and silent:
        paused = await engine.is_paused()
    version: int | None = None
    with suppress(InconsistentWeights):
        version = await engine.version()
    return ev.VersionSeen(engine=engine.name, version=version, paused=paused)


async def ask_load(engine: Engine) -> ev.LoadSeen | None:
    """Ask an engine that reports its load how full its KV pool is."""
    if not isinstance(engine, ReportsLoad):
        return None
    load = await engine.load()
    if load.kv_tokens is None or load.age_s > _INTERVAL_S:
        return None
    return ev.LoadSeen(engine=engine.name, used=load.kv_tokens, queued=load.queued)


class Claims(Part):
    """Renews the claims on the engines that the core has (`knows`); one that joins claims its own.
    `taken` is called with the name of one whose claim is lost."""

    def __init__(
        self, shell: Shell, *, knows: Callable[[str], object], taken: Callable[[str, str], None]
    ) -> None:
        super().__init__(shell)
        self._knows = knows
        self._taken = taken

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CLAIM_INTERVAL_S)
            for name, engine in self._engines.items():
                if not isinstance(engine, Claimable) or self._knows(name) is None:
                    continue
                # Each alone, because a server that loads weights answers afterwards.
                if not self._tasks.running(("claim", name)):
                    self._tasks.start(("claim", name), self._renew(name, engine))

    async def _renew(self, name: str, engine: Claimable) -> None:
        with suppress(EngineError):
            if not await engine.claim():
                self._taken(name, "is claimed by another scheduler or gateway")


# --- outages -------------------------------------------------------------------------------------

# Reports slow engines and the loss of the whole fleet, in the log and to waiting calls.


def report_slow(command: facts.EngineSlow) -> None:
    """Log that an engine is slow."""
    log.warning(
        "engine %s is slow: %s; it stays in use, because there is no other engine to compare it "
        "with",
        command.engine,
        command.cause,
    )


def report_busy(command: facts.EngineBusy) -> None:
    """Log that an engine has no room for all requests, and what avoids that."""
    log.warning(
        "engine %s has no room for in_flight=%d, so requests wait; raise its bound "
        "(--max-queued-requests), or lower dispatch.max_in_flight: %s",
        command.engine,
        command.in_flight,
        command.cause,
    )


def report_outage(command: facts.FleetAwaited) -> None:
    """Log that no engine is left, and until when one may come back."""
    now = datetime.now().astimezone()
    log.error(
        "no engine is left since %s; the scheduler waits until %s for one to come back: %s",
        _clock(now - timedelta(seconds=command.waited_s)),
        _clock(now + timedelta(seconds=command.left_s)),
        _causes(command.lost),
    )


def fleet_lost(command: facts.FleetGivenUp) -> FleetLost:
    """The error for every call, when no engine has come back."""
    return FleetLost(
        f"no engine is left and none came back within {command.waited_s:.0f} s "
        f"({_causes(command.lost)}); restart the servers, or raise health.fleet_wait_s."
    )


def wants_update(engines: Iterable[str], version: int, base: int | None) -> RefitError:
    """The error for a call that waits for tokens which no engine can generate before an update.

    Args:
        engines: names of the engines that are there.
        version: the fleet's version.
        base: the full model that the fleet's adapters belong to; None without adapters.
    """
    whole = (
        "" if base is None else f", as a full model where an engine does not have version {base}"
    )
    return RefitError(
        f"no engine has the fleet's weights ({', '.join(engines)} wait for them); call "
        f"update_weights(publisher, version={version}), or with newer ones, first{whole}."
    )


def _clock(when: datetime) -> str:
    return when.strftime("%H:%M:%S")


def _causes(lost: tuple[tuple[str, str], ...]) -> str:
    return "; ".join(f"{engine}: {cause}" for engine, cause in lost)
