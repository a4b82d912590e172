"""Hands engines back as they were found: running, with their memory, without our requests.

:class:`HandBack` does this for an engine that is lost or leaves the fleet. Such an engine may be
paused, the trainer may have its memory, and calls to it may be open: a refit, a release. These
calls are ended or waited for first. The memory is taken back at the end of the sleep, when the
trainer no longer uses it. An engine joins again only after it was handed back.

:meth:`HandBack.release_all` does this for every engine when the scheduler closes, within a bound.
Each engine is released on its own, so one that hangs delays no other. Its streams are closed first,
and each sends the engine an abort of its request. A continue call then goes to every engine that is
not running, whether the aborts succeeded or not; that call has its own timeout. The time limit for
the rest grows with the number of requests in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from aprilsched.errors import EngineError, EngineUnreachable
from aprilsched.kernel.core.state.engine_control import Mode
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.shell.attempts import Attempts
from aprilsched.kernel.shell.controls import EngineControls
from aprilsched.kernel.shell.refits import Refits
from aprilsched.kernel.shell.tasks import Part, Shell, TaskKey
from aprilsched.kernel.shell.watchdog import watched

log = logging.getLogger("aprilsched")

_HEAD_START_S = 1.0
"""Seconds that the continue waits for the aborts at most. An engine does not recompute a request
that is aborted during the pause."""
_AGAIN_S = 1.0
_AGAIN_EACH_S = 0.02
"""Seconds for the aborts after the continue: `_AGAIN_S`, and this value more for each abort. A real
server takes 1.5 to 3 ms for one."""
_CONTINUE_S = 10.0
"""Timeout of the last continue. A server on a busy machine answers within one or two seconds."""
_LOST_S = 1.0
"""Timeout of the last continue for an engine that is lost."""
_SAY_AFTER_S = 2.0
"""Seconds after which a last continue that has no answer is logged."""


class HandBack(Part):
    """Hands engines back, each in its own task."""

    def __init__(
        self, shell: Shell, *, attempts: Attempts, controls: EngineControls, refits: Refits
    ) -> None:
        super().__init__(shell)
        self._attempts = attempts
        self._controls = controls
        self._refits = refits
        self._timeout_s = shell.config.timeouts.control_s
        self.taken: set[str] = set()
        """Names of engines that have another owner, who decides when they continue."""
        self._pending: dict[int, Engine] = {}
        """Engines that are not handed back yet, by identity. A server that joins again before its
        engine is handed back is another engine with the same name."""

    def stop(self) -> None:
        self._tasks.cancel_kind(("hand back",))

    @property
    def pending(self) -> dict[str, Engine]:
        """The engines that are not handed back yet, by name. If two have the same name, it is the
        first, because the second was not used yet."""
        return {engine.name: engine for engine in reversed(self._pending.values())}

    def start(self, engine: Engine) -> None:
        """Hand back an engine that is out of use. It is closed afterwards, unless it is still among
        the engines of the scheduler then."""
        if id(engine) in self._pending:
            return
        name = engine.name
        self._pending[id(engine)] = engine
        requests = self._attempts.open_ids(name)
        before = self._tasks.of_kind(("hand back", name), ("readmission", name))
        aborts = self._attempts.abandon(name)
        self._controls.give_up(name)
        work = self._hand_back(engine, before, aborts, requests)
        self._tasks.start_another(("hand back", name), work)

    async def ended(self, name: str) -> None:
        """Wait until no engine of this name is being handed back, with or without success."""
        await self._tasks.ended(self._tasks.of_kind(("hand back", name)))

    async def quiet(self, name: str) -> None:
        """Wait until no engine of this name is being handed back or readmitted.

        A wake call that a hand-back or readmission started has then ended too."""
        kinds = ("hand back", name), ("readmission", name)
        await self._tasks.ended(self._tasks.of_kind(*kinds))

    async def let_go_on(self, engine: Engine) -> None:
        """Continue an engine that is out of use, when it may have all its memory again.

        Raises:
            EngineError: if a call fails.
            TimeoutError: if the engine does not answer.
        """
        await self._controls.ended(engine.name)
        await self._refits.ended(engine)
        if await self._controls.released(engine):
            await self._controls.memory_is_back.wait()
        await self._controls.wake_up(engine)
        async with asyncio.timeout(self._timeout_s):
            await engine.resume()

    # --- work ----------------------------------------------------------------------------------

    async def _hand_back(
        self,
        engine: Engine,
        before: Sequence[TaskKey],
        aborts: Sequence[TaskKey],
        requests: Sequence[str],
    ) -> None:
        await self._tasks.ended(before)
        await self._tasks.ended(aborts, within=_HEAD_START_S)
        try:
            await self.let_go_on(engine)
        except EngineUnreachable as error:
            log.debug("%s cannot be reached to continue it: %s", engine.name, error)
        except (EngineError, TimeoutError) as error:
            why = str(error) or f"{engine.name} did not answer within {self._timeout_s:g} s"
            log.warning("%s is out of use and may be left paused: %s", engine.name, why)
        else:
            if requests:
                await _abort_again(engine, requests)
        await self._tasks.ended(aborts)
        if self._engines.get(engine.name) is not engine:
            with suppress(EngineError):
                await engine.close()
        del self._pending[id(engine)]

    # --- at the end of the run -----------------------------------------------------------------

    async def release_all(self, state: SchedulerState) -> None:
        """Cancel what is open on every engine and continue it, all engines at the same time.

        This includes engines that have left the fleet and are not handed back yet. A cancellation
        does not shorten this; it is raised at the end.

        Raises:
            CancelledError: if this was cancelled, or if an engine may not have been released,
                because its task was cancelled or a KeyboardInterrupt came up in it.
        """
        self._attempts.stop_sending()
        engines = {**self._engines, **self.pending}.values()
        tasks = [asyncio.ensure_future(self._release(engine, state)) for engine in engines]
        running = set(tasks)
        cancelled: asyncio.CancelledError | None = None
        while running:
            try:
                _, running = await asyncio.wait(running)
            except asyncio.CancelledError as error:
                cancelled = error
        errors = [None if task.cancelled() else task.exception() for task in tasks]
        # asyncio has already raised a KeyboardInterrupt out of the event loop. If it were raised
        # here again, it would end the loop in which the engines are released.
        if any(task.cancelled() for task in tasks) or any(
            isinstance(error, KeyboardInterrupt) for error in errors
        ):
            raise asyncio.CancelledError
        for task in tasks:
            task.result()
        if cancelled is not None:
            raise cancelled

    async def _release(self, engine: Engine, state: SchedulerState) -> None:
        control = state.fleet.control.of(engine.name)
        left = self._engines.get(engine.name) is not engine
        # An engine that has left the fleet may work well, so it gets the long timeout.
        lost = control is None and not left
        requests = self._attempts.open_ids(engine.name)
        leaving = asyncio.ensure_future(self._attempts.leave(engine.name))
        try:
            paused = control is None or control.mode is not Mode.RUNNING
            if paused and engine.name not in self.taken:
                await asyncio.wait([leaving], timeout=_HEAD_START_S)
                await self.quiet(engine.name)
                if await self._continue(engine, lost=lost) and requests:
                    await _abort_again(engine, requests)
            await asyncio.wait([leaving])
        finally:
            leaving.cancel()

    async def _continue(self, engine: Engine, *, lost: bool) -> bool:
        """Wake the engine if its memory is released, and continue it; returns whether that
        worked."""
        bound = _LOST_S if lost else _CONTINUE_S
        try:
            if await self._controls.wake_up(engine):
                bound = _CONTINUE_S
            with watched(engine.name, "the last continue", every_s=_SAY_AFTER_S):
                async with asyncio.timeout(bound):
                    await engine.resume()
        except (EngineError, TimeoutError) as error:
            why = str(error) or f"{engine.name} did not answer within {bound:g} s"
            # The loss was logged when it happened, and the engine was continued at that time.
            expected = lost and isinstance(error, EngineUnreachable)
            level = logging.DEBUG if expected else logging.WARNING
            log.log(
                level, "the engine may be left paused, since it could not be continued: %s", why
            )
            return False
        return True


async def _abort_again(engine: Engine, requests: Sequence[str]) -> None:
    """Abort requests again after the continue.

    SGLang loses the abort of a request that a pause holds before SGLang's scheduler has got it
    (hazard 4). An abort after the continue works, and has no effect on a request that has ended.
    """
    try:
        async with asyncio.timeout(_AGAIN_S + _AGAIN_EACH_S * len(requests)):
            answers = await asyncio.gather(*map(engine.abort, requests), return_exceptions=True)
    except TimeoutError:
        log.debug("%s did not answer all aborts after the continue", engine.name)
    else:
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        log.debug("%s: %d aborts after the continue failed", engine.name, len(failed))
