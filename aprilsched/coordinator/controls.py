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

from aprilsched.coordinator.tasks import Tasks
from aprilsched.coordinator.watchdog import watched
from aprilsched.core.commands import Continue, Flush, LoseEngine, Pause, Release, Wake
from aprilsched.core.events import (
    Continued,
    ControlCall,
    ControlFailed,
    Event,
    Flushed,
    Paused,
    Released,
    Woken,
)
from aprilsched.engines.base import Engine
from aprilsched.engines.refit import SleepingEngine
from aprilsched.errors import EngineError, EngineUnreachable

__all__ = ["EngineControls"]

log = logging.getLogger("aprilsched")

Work: TypeAlias = Callable[[], Awaitable[None]]


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

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks

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
        engine, tags = self._engines[command.engine], command.tags
        done = Released(engine=command.engine, tags=tags)
        self._begin(command.engine, "release", lambda: _sleeping(engine).release(tags), done)

    def wake(self, command: Wake) -> None:
        engine, tags = self._engines[command.engine], command.tags
        done = Woken(engine=command.engine, tags=tags)
        self._begin(command.engine, "wake", lambda: _sleeping(engine).wake(tags), done)

    def give_up(self, command: LoseEngine) -> None:
        """A lost engine may hang in a pause: let it go on, if it still listens."""
        if command.standby or self._tasks is None:
            return
        self._tasks.cancel_kind(("control", command.engine))
        self._start(command.engine, self._let_go(self._engines[command.engine]))

    # --- work ----------------------------------------------------------------------------------

    def _begin(self, engine: str, call: ControlCall, work: Work, done: Event) -> None:
        self._start(engine, self._call(engine, call, work, done))

    def _start(self, engine: str, work: Coroutine[Any, Any, None]) -> None:
        self._calls += 1
        if self._tasks is not None:
            self._tasks.start(("control", engine, self._calls), work)

    async def _call(self, engine: str, call: ControlCall, work: Work, done: Event) -> None:
        try:
            with watched(engine, call):
                async with asyncio.timeout(self._timeout_s):
                    await work()
        except (EngineError, TimeoutError) as error:
            cause = str(error) or f"no answer within {self._timeout_s:g} s"
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


def _sleeping(engine: Engine) -> SleepingEngine:
    if not isinstance(engine, SleepingEngine):
        raise EngineError(engine.name, "cannot release memory; do not use asleep() with it.")
    return engine
