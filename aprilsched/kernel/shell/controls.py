"""Makes control calls to engines: pause, flush, release, wake, continue, verify.

Each call has a timeout. A call that fails or times out is reported with the engine's name, and the
core then does without the engine, so that nothing waits forever.

The calls of a lost engine are cancelled, except a release or a wake. The effect of these must be
known, because SGLang crashes when memory is woken that was not released. The engine gets no other
call before they have ended (:mod:`aprilsched.kernel.shell.handback`), so their answers cannot be
mistaken for answers of a restarted process.

An engine that runs although it was paused here has another owner, which may load weights too. The
scheduler ends before it loads half of a version under the other's requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from aprilsched.errors import EngineError, InconsistentWeights
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import SleepingEngine
from aprilsched.kernel.engines.self_check import check_tokens
from aprilsched.kernel.shell.sharing import shows_pause
from aprilsched.kernel.shell.tasks import Part, Shell, TaskKey
from aprilsched.kernel.shell.watchdog import watched
from aprilsched.kernel.weights.threads import to_the_end

Work: TypeAlias = Callable[[], Awaitable[ev.Event]]
"""Makes a control call, and returns the event that reports its end."""

_WATCH_S = 1.0
"""Seconds between two questions to an engine whether it is still paused."""
_VERIFY_S = 10.0
"""Seconds within which an engine must tell its version. The requests of the other engines wait for
it too, so an engine that hangs must not delay them for longer."""


class EngineControls(Part):
    """Carries out control commands."""

    def __init__(self, shell: Shell, taken: Callable[[str, str], None]) -> None:
        super().__init__(shell)
        self._taken = taken
        self._timeout_s = shell.config.timeouts.control_s
        self._pauses: dict[str, object] = {}
        """A mark for each engine that was paused here, shows it and was not continued since."""
        self._memory_calls: dict[str, TaskKey] = {}
        """Task of the last release or wake of each engine."""
        self.memory_is_back = asyncio.Event()
        """Set while the trainer has no engine's memory."""
        self.memory_is_back.set()

    def stop(self) -> None:
        """Cancel all calls except releases and wakes."""
        self._pauses.clear()
        self._tasks.cancel_kind(("control",), but=self._memory_calls.values())

    def give_up(self, engine: str) -> None:
        """Cancel all calls of a lost engine except releases and wakes."""
        self._pauses.pop(engine, None)
        self._tasks.cancel_kind(("control", engine), but=self._memory_calls.values())

    async def ended(self, engine: str) -> None:
        """Wait until every call of the engine has ended, with or without success."""
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
        if call is not None:
            await self._tasks.ended([call])
        tags = await self.released(engine)
        if tags:
            # To its end, even if the caller is cancelled, because its effect must be known.
            await to_the_end(self._wake(_sleeping(engine), sorted(tags)))
        return bool(tags)

    async def _wake(self, engine: SleepingEngine, tags: Sequence[str]) -> None:
        async with asyncio.timeout(self._timeout_s):
            await engine.wake(tags)

    async def watch_pauses(self, judges: Callable[[], bool]) -> None:
        """Ask every engine that is paused here, once a second, whether it still is.

        The check is skipped while `judges` is False: the trainer may then continue the engine.
        """
        while True:
            await asyncio.sleep(_WATCH_S)
            names = [name for name in self._pauses if name in self._engines and judges()]
            await asyncio.gather(*(self.is_mine(self._engines[name]) for name in names))

    async def is_mine(self, engine: Engine) -> bool:
        """Whether no other client has continued the engine since it was paused here; otherwise the
        scheduler ends."""
        mark = self._pauses.get(engine.name)
        if mark is None or await shows_pause(engine) is not False:
            return True
        try:
            await engine.verify()
        except InconsistentWeights:
            pass
        except EngineError:
            return True  # It was restarted or is lost, which its next call shows.
        if self._pauses.get(engine.name) is not mark:
            return True
        self._taken(engine.name, "runs although this scheduler has paused it")
        return False

    # --- commands ------------------------------------------------------------------------------

    def pause(self, command: do.Pause) -> None:
        engine = self._engines[command.engine]
        done = ev.Paused(engine=command.engine)

        async def paused() -> None:
            await engine.pause(command.mode)
            if await shows_pause(engine):
                self._pauses[command.engine] = object()

        self._begin(command.engine, "pause", paused, done)

    def flush(self, command: do.Flush) -> None:
        engine = self._engines[command.engine]
        done = ev.Flushed(engine=command.engine)
        self._begin(command.engine, "flush", lambda: self._flushed(engine, engine.flush), done)

    async def _flushed(self, engine: Engine, flush: Callable[[], Awaitable[None]]) -> None:
        """Call `flush` without a check of the pause, because an adapter may let the engine run
        between two attempts."""
        paused = self._pauses.pop(engine.name, None)
        await flush()
        if paused is not None:
            self._pauses[engine.name] = object()

    def resume(self, command: do.Continue) -> None:
        engine = self._engines[command.engine]
        self._pauses.pop(command.engine, None)
        self._begin(command.engine, "continue", engine.resume, ev.Continued(engine=command.engine))

    def release(self, command: do.Release) -> None:
        name, tags = command.engine, command.tags
        engine, done = self._engines[name], ev.Released(engine=name, tags=tags)
        self.memory_is_back.clear()
        self._memory_calls[name] = self._begin(
            name,
            "release",
            lambda: self._flushed(engine, lambda: _sleeping(engine).release(tags)),
            done,
        )

    def wake(self, command: do.Wake) -> None:
        name, tags = command.engine, command.tags
        engine, done = self._engines[name], ev.Woken(engine=name, tags=tags)
        self._memory_calls[name] = self._begin(
            name, "wake", lambda: _sleeping(engine).wake(tags), done
        )

    def verify(self, command: do.Verify) -> None:
        timeout_s = min(_VERIFY_S, self._timeout_s)
        work = self._call(
            command.engine,
            "verify",
            lambda: _verified(self._engines[command.engine], generates=command.generates),
            timeout_s=timeout_s,
        )
        self._tasks.start_another(("control", command.engine), work)

    # --- work ----------------------------------------------------------------------------------

    def _begin(
        self, engine: str, call: ev.ControlCall, work: Callable[[], Awaitable[None]], done: ev.Event
    ) -> TaskKey:
        async def carried_out() -> ev.Event:
            await work()
            return done

        called = self._call(engine, call, carried_out, timeout_s=self._timeout_s)
        return self._tasks.start_another(("control", engine), called)

    async def _call(
        self, engine: str, call: ev.ControlCall, work: Work, *, timeout_s: float
    ) -> None:
        try:
            with watched(engine, call):
                async with asyncio.timeout(timeout_s):
                    done = await work()
        except (EngineError, TimeoutError) as error:
            cause = str(error) or f"no answer within {timeout_s:g} s"
            self._feed(ev.ControlFailed(engine=engine, call=call, cause=cause))
        else:
            self._feed(done)


async def _verified(engine: Engine, *, generates: bool) -> ev.Event:
    try:
        version: int | None = await engine.verify()
    except InconsistentWeights:
        version = None
    if generates:
        await check_tokens(engine, finite=version is not None)
    return ev.Verified(engine=engine.name, version=version)


def _sleeping(engine: Engine) -> SleepingEngine:
    if not isinstance(engine, SleepingEngine):
        raise EngineError(engine.name, "cannot release memory; do not use asleep() with it.")
    return engine
