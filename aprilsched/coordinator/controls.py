"""Control calls of engines: pause, flush, refit, continue; each with a bound on its time.

A call that fails or stalls is reported with the engine's name; the core then does without the
engine, so nothing waits for ever and no pause is left without its continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from aprilsched.coordinator.tasks import Tasks
from aprilsched.core.commands import Continue, Flush, LoseEngine, Pause, Refit
from aprilsched.core.events import (
    Continued,
    ControlCall,
    ControlFailed,
    Event,
    Flushed,
    Paused,
    Refitted,
)
from aprilsched.engines.base import Engine
from aprilsched.errors import EngineError
from aprilsched.weights.base import WeightPublisher

__all__ = ["EngineControls", "RefitReport"]

log = logging.getLogger("aprilsched")

_SLOW_CALL_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitReport:
    """What an update did.

    Attributes:
        version: the policy version that all engines in use have now.
        quarantined: engines that did not take it, with the cause; their rollouts go on on others.
        seconds: from the call to the last engine's answer, preparation included.
    """

    version: int
    quarantined: Mapping[str, str]
    seconds: float


class EngineControls:
    """Carries control commands out."""

    def __init__(
        self,
        *,
        engines: Mapping[str, Engine],
        feed: Callable[[Event], None],
        call_timeout_s: float,
        refit_timeout_s: float,
    ) -> None:
        self.publisher: WeightPublisher | None = None
        self.failure: Exception | None = None
        """What the publisher raised, to be chained to the error the trainer gets."""
        self._engines = engines
        self._feed = feed
        self._call_timeout_s = call_timeout_s
        self._refit_timeout_s = refit_timeout_s
        self._tasks: Tasks | None = None
        self._calls = 0

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks

    # --- commands ------------------------------------------------------------------------------

    def pause(self, command: Pause) -> None:
        call = self._engines[command.engine].pause(command.mode)
        self._begin(command.engine, "pause", call, Paused(engine=command.engine))

    def flush(self, command: Flush) -> None:
        call = self._engines[command.engine].flush()
        self._begin(command.engine, "flush", call, Flushed(engine=command.engine))

    def resume(self, command: Continue) -> None:
        call = self._engines[command.engine].resume()
        self._begin(command.engine, "continue", call, Continued(engine=command.engine))

    def refit(self, command: Refit) -> None:
        self._start(self._refit(command))

    def release(self, command: LoseEngine) -> None:
        """A lost engine may hang in a pause: let it go on, if it still listens."""
        self._start(self._release(command.engine))

    # --- work ----------------------------------------------------------------------------------

    def _begin(self, engine: str, call: ControlCall, work: Awaitable[None], done: Event) -> None:
        self._start(self._call(engine, call, work, done))

    def _start(self, work: Awaitable[None]) -> None:
        self._calls += 1
        if self._tasks is not None:
            self._tasks.start(("control", self._calls), _as_coroutine(work))

    async def _call(
        self, engine: str, call: ControlCall, work: Awaitable[None], done: Event
    ) -> None:
        watchdog = asyncio.get_running_loop().call_later(
            _SLOW_CALL_S, log.warning, "%s has not answered %s for %g s", engine, call, _SLOW_CALL_S
        )
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await work
        except (EngineError, TimeoutError) as error:
            cause = str(error) or f"no answer within {self._call_timeout_s:g} s"
            self._feed(ControlFailed(engine=engine, call=call, cause=cause))
        else:
            self._feed(done)
        finally:
            watchdog.cancel()

    async def _refit(self, command: Refit) -> None:
        causes = await self._publish(command)
        async with asyncio.TaskGroup() as group:
            for name in command.engines:
                group.create_task(self._verify(name, causes.get(name) or ""))

    async def _publish(self, command: Refit) -> dict[str, str]:
        """Bring the version in; for each engine why it failed, or an empty string."""
        engines = [self._engines[name] for name in command.engines]
        self.failure = None
        if self.publisher is None:
            return dict.fromkeys(command.engines, "there is no publisher")
        try:
            async with asyncio.timeout(self._refit_timeout_s):
                results = await self.publisher.publish(command.version, engines)
        except TimeoutError:
            cause = f"the publisher did not finish within {self._refit_timeout_s:g} s"
            return dict.fromkeys(command.engines, cause)
        except Exception as error:
            # A publisher is the caller's code: whatever it raises ends this update, not the run.
            self.failure = error
            return dict.fromkeys(command.engines, f"the publisher raised {error!r}")
        return {name: str(error) if error else "" for name, error in results.items()}

    async def _verify(self, name: str, cause: str) -> None:
        """Believe only what the engine itself says of its version."""
        try:
            async with asyncio.timeout(self._call_timeout_s):
                version = await self._engines[name].version()
        except (EngineError, TimeoutError) as error:
            why = cause or str(error) or f"no answer within {self._call_timeout_s:g} s"
            self._feed(ControlFailed(engine=name, call="refit", cause=why))
        else:
            self._feed(Refitted(engine=name, version=version, cause=cause))

    async def _release(self, name: str) -> None:
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await self._engines[name].resume()
        except (EngineError, TimeoutError) as error:
            log.warning("%s is lost and could not be told to continue: %s", name, error)


async def _as_coroutine(work: Awaitable[None]) -> None:
    await work
