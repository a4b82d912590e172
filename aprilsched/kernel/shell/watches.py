"""Watches all engines: their versions if another client moves the weights, and their KV pools if
requests move from full ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aprilsched.errors import EngineError, EngineUnreachable, InconsistentWeights
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.engines.base import CLAIM_INTERVAL_S, Claimable, Engine, TellsPause
from aprilsched.kernel.engines.load import EngineLoad, ReportsLoad
from aprilsched.kernel.shell.tasks import Part, Shell

INTERVAL_S = 1.0
"""Seconds between two queries of an engine."""
_ANSWER_S = 10.0
"""Seconds that an engine has for an answer. This watch ignores an engine that does not answer."""
_AT_ONCE = 32


class Watch(Part):
    """Sends every engine a query once a second, and passes the answers to the core."""

    def __init__(self, shell: Shell, ask: Callable[[Engine], Awaitable[ev.Event | None]]) -> None:
        super().__init__(shell)
        self._ask = ask
        self._limit = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
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


async def ask_load(engine: Engine, *, every: bool) -> ev.LoadSeen | None:
    """Ask an engine how full its KV pool is, if it reports its load.

    Unless `every` engine is asked, only one that keeps the KV of sessions is.
    """
    wanted = every or engine.capabilities.caches_contexts
    if not wanted or not isinstance(engine, ReportsLoad):
        return None
    return load_seen(engine.name, await engine.load(metrics=True))


def load_seen(engine: str, load: EngineLoad) -> ev.LoadSeen | None:
    """Return the event of a report, or None without a recent one."""
    if load.kv_tokens is None or load.age_s > INTERVAL_S:
        return None
    return ev.LoadSeen(
        engine=engine,
        used=load.kv_tokens,
        queued=load.queued,
        preemptions=load.preemptions,
    )


class Claims(Part):
    """Renews the claims on the engines that the core has (`knows`); an engine that joins is claimed
    on joining. `taken` is called with the name of an engine whose claim is lost.

    Engines that are idle (`idles`) are asked for their version too, because no request would show
    that one has ended; `gone` is called with its name.
    """

    def __init__(
        self,
        shell: Shell,
        *,
        knows: Callable[[str], object],
        taken: Callable[[str, str], None],
        idles: Callable[[str], bool],
        gone: Callable[[str, str], None],
    ) -> None:
        super().__init__(shell)
        self._knows = knows
        self._taken = taken
        self._idles = idles
        self._gone = gone

    async def run(self) -> None:
        while True:
            await asyncio.sleep(CLAIM_INTERVAL_S)
            for name, engine in self._engines.items():
                if not isinstance(engine, Claimable) or self._knows(name) is None:
                    continue
                # Each alone, because a server that loads weights answers afterwards.
                if not self._tasks.running(("claim", name)):
                    self._tasks.start(("claim", name), self._renew(name, engine))
                if self._idles(name) and not self._tasks.running(("claim", name, "idle")):
                    self._tasks.start(("claim", name, "idle"), self._ask_idle(engine))

    async def _renew(self, name: str, engine: Claimable) -> None:
        with suppress(EngineError):
            if not await engine.claim():
                self._taken(name, "is claimed by another scheduler or gateway")

    async def _ask_idle(self, engine: Engine) -> None:
        try:
            await engine.version()
        except EngineUnreachable as error:
            if self._idles(engine.name):
                self._gone(engine.name, str(error))
        except EngineError:
            pass
