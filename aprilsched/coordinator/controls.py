"""Makes control calls to engines: pause, flush, release, wake, continue, verify.

Each call has a timeout. A call that fails or times out is reported with the engine's name, and the
core then does without the engine, so that nothing waits forever.

The calls of a lost engine are cancelled, except a release or a wake. The effect of these must be
known, because SGLang crashes when memory is woken that was not released. The engine gets no other
call before they have ended (:mod:`aprilsched.coordinator.handback`), so their answers cannot be
taken for answers of the process that comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeAlias

from aprilsched.coordinator.tasks import TaskKey, Tasks, watched
from aprilsched.core.messages.commands import (
    Continue,
    Flush,
    Pause,
    Release,
    Verify,
    Wake,
)
from aprilsched.core.messages.events import (
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
from aprilsched.engines.base import Engine, SleepingEngine
from aprilsched.engines.selfcheck import check_tokens
from aprilsched.errors import EngineError, InconsistentWeights

Work: TypeAlias = Callable[[], Awaitable[Event]]
"""Makes a control call, and returns the event that reports its end."""

_VERIFY_S = 10.0
"""Seconds within which an engine must tell its version. The requests of the other engines wait for
it too, so an engine that hangs must not delay them for longer."""


class EngineControls:
    """Carries out control commands."""

    def __init__(
        self, *, engines: Mapping[str, Engine], feed: Callable[[Event], None], timeout_s: float
    ) -> None:
        self._engines = engines
        self._feed = feed
        self._timeout_s = timeout_s
        self._tasks: Tasks | None = None
        self._calls = 0
        self._memory_calls: dict[str, TaskKey] = {}
        """Task of the last release or wake of each engine."""
        self.memory_is_back = asyncio.Event()
        """Set while the trainer has no engine's memory."""
        self.memory_is_back.set()

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        """Cancel all calls except releases and wakes."""
        if self._tasks is not None:
            self._tasks.cancel_kind(("control",), but=self._memory_calls.values())

    def give_up(self, engine: str) -> None:
        """Cancel all calls of a lost engine except releases and wakes."""
        if self._tasks is not None:
            self._tasks.cancel_kind(("control", engine), but=self._memory_calls.values())

    async def ended(self, engine: str) -> None:
        """Wait until every call of the engine has ended, with or without success."""
        if self._tasks is not None:
            await self._tasks.ended(self._tasks.of_kind(("control", engine)))

    async def released(self, engine: Engine) -> frozenset[str]:
        """The tags whose memory the engine has released.

        Raises:
            EngineError: if the call fails.
            TimeoutError: if the engine does not answer.
        """
        if not isinstance(engine, SleepingEngine):
            return frozenset()
        async with asyncio.timeout(self._timeout_s):
            return await engine.released()

    async def wake_up(self, engine: Engine) -> bool:
        """Take back all memory that is released; returns whether there was any.

        Raises:
            EngineError: if the engine does not take its memory back.
            TimeoutError: if the engine does not answer.
        """
        call = self._memory_calls.get(engine.name)
        if call is not None and self._tasks is not None:
            await self._tasks.ended([call])
        tags = await self.released(engine)
        if tags:
            await self._to_its_end(_sleeping(engine).wake(sorted(tags)))
        return bool(tags)

    async def _to_its_end(self, wake: Coroutine[Any, Any, None]) -> None:
        """Run `wake` to its end, even if the caller is cancelled, because its effect must be
        known."""

        async def bounded() -> None:
            async with asyncio.timeout(self._timeout_s):
                await wake

        task, cancelled = asyncio.ensure_future(bounded()), False
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                cancelled = True
        if cancelled and not task.cancelled():
            task.exception()  # marks the error as retrieved, because the caller is cancelled
            raise asyncio.CancelledError
        task.result()

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
        engine, done = self._engines[name], Released(engine=name, tags=tags)
        self.memory_is_back.clear()
        self._memory_calls[name] = self._begin(
            name, "release", lambda: _sleeping(engine).release(tags), done
        )

    def wake(self, command: Wake) -> None:
        name, tags = command.engine, command.tags
        engine, done = self._engines[name], Woken(engine=name, tags=tags)
        self._memory_calls[name] = self._begin(
            name, "wake", lambda: _sleeping(engine).wake(tags), done
        )

    def verify(self, command: Verify) -> None:
        timeout_s = min(_VERIFY_S, self._timeout_s)
        work = self._call(
            command.engine,
            "verify",
            lambda: _verified(self._engines[command.engine], generates=command.generates),
            timeout_s=timeout_s,
        )
        self._start(command.engine, work)

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


async def _verified(engine: Engine, *, generates: bool) -> Event:
    try:
        version: int | None = await engine.verify()
    except InconsistentWeights:
        version = None
    if generates:
        await check_tokens(engine, finite=version is not None)
    return Verified(engine=engine.name, version=version)


def _sleeping(engine: Engine) -> SleepingEngine:
    if not isinstance(engine, SleepingEngine):
        raise EngineError(engine.name, "cannot release memory; do not use asleep() with it.")
    return engine
