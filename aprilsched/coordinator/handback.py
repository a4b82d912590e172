"""Handing back engines that are out of use: running, with their memory, without our requests.

An engine that is lost or leaves the fleet may be paused, its memory may be lent to the trainer, and
calls to it may be under way: a refit, a release. They are ended or waited for first, and memory is
taken back when the trainer has given it back, so at the end of the sleep. An engine joins (again)
only after that. What is not handed back at close() is handed back there
(:mod:`aprilsched.coordinator.closing`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from aprilsched.coordinator.attempts import Attempts
from aprilsched.coordinator.controls import EngineControls
from aprilsched.coordinator.refits import Refits
from aprilsched.coordinator.tasks import TaskKey, Tasks
from aprilsched.engines.base import Engine
from aprilsched.errors import EngineError, EngineUnreachable

__all__ = ["HandBack", "abort_again"]

log = logging.getLogger("aprilsched")

HEAD_START_S = 1.0
"""For the aborts, before the continue: what is aborted in a pause is not recomputed after it."""
_AGAIN_S = 1.0
_AGAIN_EACH_S = 0.02
"""For the aborts after the continue: a bound, and so much more for each of them. A real server
takes 1.5 to 3 ms for one."""


class HandBack:
    """Hands engines back, each in a task of its own."""

    def __init__(
        self,
        *,
        attempts: Attempts,
        controls: EngineControls,
        refits: Refits,
        engines: Mapping[str, Engine],
        timeout_s: float,
    ) -> None:
        self._attempts = attempts
        self._controls = controls
        self._refits = refits
        self._engines = engines
        self._timeout_s = timeout_s
        self._tasks: Tasks | None = None
        self._begun = 0
        self._owed: dict[int, Engine] = {}
        """By identity: a server that joins again before that is another engine of its name."""

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def stop(self) -> None:
        if self._tasks is not None:
            self._tasks.cancel_kind(("hand back",))

    @property
    def owed(self) -> dict[str, Engine]:
        """The engines that have not been handed back yet, by name. Of two of one name it is the
        first: the other has not been used."""
        return {engine.name: engine for engine in reversed(self._owed.values())}

    def begin(self, engine: Engine) -> None:
        """It is out of use. Unless it is among the engines at the end, it is closed."""
        if self._tasks is None or id(engine) in self._owed:
            return
        name = engine.name
        self._owed[id(engine)] = engine
        self._begun += 1
        requests = self._attempts.open_ids(name)
        before = self._tasks.of_kind(("hand back", name), ("readmission", name))
        aborts = self._attempts.abandon(name)
        self._controls.give_up(name)
        work = self._hand_back(self._tasks, engine, before, aborts, requests)
        self._tasks.start(("hand back", name, self._begun), work)

    def under_way(self, name: str) -> bool:
        """Is an engine of this name not handed back yet?"""
        return name in self.owed

    async def ended(self, name: str) -> None:
        """Wait until no engine of this name is being handed back, however that ends."""
        if self._tasks is not None:
            await self._tasks.ended(self._tasks.of_kind(("hand back", name)))

    async def quiet(self, name: str) -> None:
        """The same, and until none is examined: a wake that was given up is over then."""
        if self._tasks is not None:
            kinds = ("hand back", name), ("readmission", name)
            await self._tasks.ended(self._tasks.of_kind(*kinds))

    async def let_go_on(self, engine: Engine) -> None:
        """Continue an engine that is out of use, as soon as it may have all its memory.

        Raises:
            EngineError: if it does not do that.
            TimeoutError: if it does not answer.
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
        tasks: Tasks,
        engine: Engine,
        before: Sequence[TaskKey],
        aborts: Sequence[TaskKey],
        requests: Sequence[str],
    ) -> None:
        await tasks.ended(before)
        await tasks.ended(aborts, within=HEAD_START_S)
        try:
            await self.let_go_on(engine)
        except EngineUnreachable as error:
            log.debug("%s is not there to be told to continue: %s", engine.name, error)
        except (EngineError, TimeoutError) as error:
            why = str(error) or f"{engine.name} did not answer within {self._timeout_s:g} s"
            log.warning("%s is out of use and may be left paused: %s", engine.name, why)
        else:
            if requests:
                await abort_again(engine, requests)
        await tasks.ended(aborts)
        if self._engines.get(engine.name) is not engine:
            with suppress(EngineError):
                await engine.close()
        del self._owed[id(engine)]


async def abort_again(engine: Engine, requests: Sequence[str]) -> None:
    """SGLang loses an abort of a request that a pause holds before its scheduler has heard of it
    (hazard 4). After the continue it counts; for what is gone already it does nothing."""
    try:
        async with asyncio.timeout(_AGAIN_S + _AGAIN_EACH_S * len(requests)):
            answers = await asyncio.gather(*map(engine.abort, requests), return_exceptions=True)
    except TimeoutError:
        log.debug("%s did not answer all aborts after the continue", engine.name)
    else:
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        log.debug("%s: %d aborts after the continue failed", engine.name, len(failed))
