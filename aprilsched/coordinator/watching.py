"""Watches all engines: their versions, where somebody else moves the weights, and their KV pools,
where requests move from full ones."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress

from aprilsched.coordinator.tasks import Tasks
from aprilsched.core.messages.events import Event, LoadSeen, VersionSeen
from aprilsched.engines.base import Engine, TellsPause
from aprilsched.engines.load import ReportsLoad
from aprilsched.errors import EngineError, InconsistentWeights

__all__ = ["LoadWatch", "VersionWatch"]

_INTERVAL_S = 1.0
_ANSWER_S = 10.0
"""Seconds that an engine has for an answer. One that does not answer is no matter of this watch."""
_AT_ONCE = 32


class _Watch(ABC):
    """Asks every engine something once a second."""

    name: str

    def __init__(self, *, engines: Mapping[str, Engine], feed: Callable[[Event], None]) -> None:
        self._engines = engines
        self._feed = feed
        self._limit = asyncio.Semaphore(_AT_ONCE)

    def start(self, tasks: Tasks) -> None:
        tasks.start(self.name, self._watch())

    async def _watch(self) -> None:
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

    @abstractmethod
    async def _ask(self, engine: Engine) -> Event | None: ...


class VersionWatch(_Watch):
    """Asks every engine for its version, and whether it is paused if it is silent.

    The labels on tokens are not enough: an engine without requests sends none, and a trainer that
    waits for the next version launches none.
    """

    name = "version watch"

    def __init__(
        self,
        *,
        engines: Mapping[str, Engine],
        silent: Callable[[str], bool],
        feed: Callable[[Event], None],
    ) -> None:
        super().__init__(engines=engines, feed=feed)
        self._silent = silent

    async def _ask(self, engine: Engine) -> VersionSeen:
        paused = None
        if isinstance(engine, TellsPause) and self._silent(engine.name):
            paused = await engine.is_paused()
        version: int | None = None
        with suppress(InconsistentWeights):
            version = await engine.version()
        return VersionSeen(engine=engine.name, version=version, paused=paused)


class LoadWatch(_Watch):
    """Asks every engine that reports its load how full its KV pool is."""

    name = "load watch"

    async def _ask(self, engine: Engine) -> LoadSeen | None:
        if not isinstance(engine, ReportsLoad):
            return None
        load = await engine.load()
        if load.kv_tokens is None or load.age_s > _INTERVAL_S:
            return None
        return LoadSeen(engine=engine.name, used=load.kv_tokens, queued=load.queued)
