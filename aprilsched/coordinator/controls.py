"""Control calls of engines: pause, flush, release, wake, continue; each with a bound on its time.

A call that fails or stalls is reported with the engine's name; the core then does without the
engine, so nothing waits for ever and no pause is left without its continue. The calls of a lost
engine are given up with it: what they answer later must not be taken for its next incarnation's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeAlias

from aprilsched.coordinator.tasks import TaskKey, Tasks
from aprilsched.coordinator.watchdog import watched
from aprilsched.core.commands import Continue, Flush, LoseEngine, Pause, Release, Verify, Wake
from aprilsched.core.events import (
    Continued,
    ControlCall,
    ControlFailed,
    Event,
    Flushed,
    Paused,
    Released,
    Verified,
    Woken,
)
from aprilsched.engines.base import Engine
from aprilsched.engines.refit import SleepingEngine
from aprilsched.errors import EngineError, EngineUnreachable, TornWeights

__all__ = ["EngineControls"]

log = logging.getLogger("aprilsched")

Work: TypeAlias = Callable[[], Awaitable[Event]]
"""A control call, and the event that answers it."""

_VERIFY_S = 10.0
"""For an engine to tell its version. The others' requests wait for it too, so no longer than that
for one that hangs."""


class EngineControls:
    """Carries control commands out."""

    def __init__(
        self, *, engines: Mapping[str, Engine], feed: Callable[[Event], None], timeout_s: float
    ) -> None:
        self._engines = engines
        self._feed = feed
        self._timeout_s = timeout_s
        self._tasks: Tasks | None = None
        self._calls = 0
        self._lent: dict[str, frozenset[str]] = {}
        """Memory of each engine that is released, as far as its answers tell."""
        self._lending: dict[str, TaskKey] = {}
        """The last release or wake of each engine."""

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        """Give up all calls but releases and wakes: what those have done must be known, since
        SGLang dies of waking what was not released."""
        if self._tasks is not None:
            self._tasks.cancel_kind(("control",), but=self._lending.values())

    async def wake_up(self, engine: Engine) -> None:
        """Take back all memory that is released, if there is any.

        Raises:
            EngineError: if the engine does not give it back.
            TimeoutError: if it does not answer.
        """
        lending = self._lending.get(engine.name)
        if lending is not None and self._tasks is not None:
            await self._tasks.ended([lending])
        tags = self._lent.get(engine.name)
        if tags:
            async with asyncio.timeout(self._timeout_s):
                await _sleeping(engine).wake(sorted(tags))

    # --- commands ------------------------------------------------------------------------------

    def pause(self, command: Pause) -> None:
        engine = self._engines[command.engine]
        done = Paused(engine=command.engine)
        self._begin(command.engine, "pause", lambda: engine.pause(command.mode), done)

    def flush(self, command: Flush) -> None:
        engine = self._engines[command.engine]
        self._begin(command.engine, "flush", engine.flush, Flushed(engine=command.engine))

    def resume(self, command: Continue) -> None:
        engine = self._engines[command.engine]
        self._begin(command.engine, "continue", engine.resume, Continued(engine=command.engine))

    def release(self, command: Release) -> None:
        name, tags = command.engine, command.tags

        async def work() -> None:
            await _sleeping(self._engines[name]).release(tags)
            self._lent[name] = self._lent.get(name, frozenset()).union(tags)

        self._lending[name] = self._begin(name, "release", work, Released(engine=name, tags=tags))

    def wake(self, command: Wake) -> None:
        name, tags = command.engine, command.tags

        async def work() -> None:
            await _sleeping(self._engines[name]).wake(tags)
            self._lent[name] = self._lent.get(name, frozenset()).difference(tags)

        self._lending[name] = self._begin(name, "wake", work, Woken(engine=name, tags=tags))

    def verify(self, command: Verify) -> None:
        timeout_s = min(_VERIFY_S, self._timeout_s)
        work = self._call(
            command.engine,
            "verify",
            lambda: _verified(self._engines[command.engine]),
            timeout_s=timeout_s,
        )
        self._start(command.engine, work)

    def give_up(self, command: LoseEngine) -> None:
        """A lost engine may hang in a pause: let it go on, if it still listens."""
        if command.standby or self._tasks is None:
            return
        self._lent.pop(command.engine, None)
        self._tasks.cancel_kind(("control", command.engine))
        self._start(command.engine, self._let_go(self._engines[command.engine]))

    # --- work ----------------------------------------------------------------------------------

    def _begin(
        self, engine: str, call: ControlCall, work: Callable[[], Awaitable[None]], done: Event
    ) -> TaskKey:
        async def carried_out() -> Event:
            await work()
            return done

        return self._start(engine, self._call(engine, call, carried_out, timeout_s=self._timeout_s))

    def _start(self, engine: str, work: Coroutine[Any, Any, None]) -> TaskKey:
        self._calls += 1
        key = ("control", engine, self._calls)
        if self._tasks is not None:
            self._tasks.start(key, work)
        return key

    async def _call(self, engine: str, call: ControlCall, work: Work, *, timeout_s: float) -> None:
        try:
            with watched(engine, call):
                async with asyncio.timeout(timeout_s):
                    done = await work()
        except (EngineError, TimeoutError) as error:
            cause = str(error) or f"no answer within {timeout_s:g} s"
            self._feed(ControlFailed(engine=engine, call=call, cause=cause))
        else:
            self._feed(done)

    async def _let_go(self, engine: Engine) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await engine.resume()
        except EngineUnreachable as error:
            log.debug("%s is not there to be told to continue: %s", engine.name, error)
        except (EngineError, TimeoutError) as error:
            log.warning("%s is lost and could not be told to continue: %s", engine.name, error)


async def _verified(engine: Engine) -> Event:
    try:
        version: int | None = await engine.verify()
    except TornWeights:
        version = None
    return Verified(engine=engine.name, version=version)


def _sleeping(engine: Engine) -> SleepingEngine:
    if not isinstance(engine, SleepingEngine):
        raise EngineError(engine.name, "cannot release memory; do not use asleep() with it.")
    return engine
