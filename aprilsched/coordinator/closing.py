"""Leaving the engines as they were: nothing of ours decoding, nothing paused, within a bound.

Each engine is left on its own, so that one that hangs holds up no other. Its streams are left
first: that closes their connections, and each tells the engine to abort its request. An engine
that is not running is then told to continue, whatever became of the aborts: that call has a bound
of its own. How long the rest takes is bounded by how much there is to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from aprilsched.coordinator.attempts import Attempts
from aprilsched.coordinator.controls import EngineControls
from aprilsched.coordinator.watchdog import watched
from aprilsched.core.control import Mode
from aprilsched.core.state import SchedulerState
from aprilsched.engines.base import Engine
from aprilsched.errors import EngineError, EngineUnreachable

__all__ = ["release"]

log = logging.getLogger("aprilsched")

_HEAD_START_S = 1.0
"""For the aborts, before the continue: what is aborted in a pause is not recomputed after it."""
_CONTINUE_S = 10.0
"""For the continue. A server on a busy machine answers within one or two seconds."""
_LOST_S = 1.0
"""The same, for an engine that was given up before."""
_AGAIN_S = 1.0
_AGAIN_EACH_S = 0.02
"""For the aborts after the continue: a bound, and so much more for each of them. A real server
takes 1.5 to 3 ms for one."""
_SAY_AFTER_S = 2.0


async def release(
    attempts: Attempts,
    controls: EngineControls,
    engines: Mapping[str, Engine],
    state: SchedulerState,
) -> None:
    """Leave what is open on every engine and let it go on, all engines at the same time.

    A cancellation does not cut this short; it is raised at the end.

    Raises:
        CancelledError: if this was cancelled, or if an engine may not have been released, because
            its task was cancelled or a KeyboardInterrupt came up in it.
    """
    attempts.stop_sending()
    running = {
        asyncio.ensure_future(_release(attempts, controls, engine, state))
        for engine in engines.values()
    }
    tasks = list(running)
    cancelled: asyncio.CancelledError | None = None
    while running:
        try:
            _, running = await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    errors = [None if task.cancelled() else task.exception() for task in tasks]
    # A KeyboardInterrupt has left the event loop where it was raised. Raised here once more, it
    # would end the loop in which the engines are released.
    if any(task.cancelled() for task in tasks) or any(
        isinstance(error, KeyboardInterrupt) for error in errors
    ):
        raise asyncio.CancelledError
    for task in tasks:
        task.result()
    if cancelled is not None:
        raise cancelled


async def _release(
    attempts: Attempts, controls: EngineControls, engine: Engine, state: SchedulerState
) -> None:
    control = state.control.of(engine.name)
    requests = attempts.open_ids(engine.name)
    leaving = asyncio.ensure_future(attempts.leave(engine.name))
    try:
        if control is None or control.mode is not Mode.RUNNING:
            await asyncio.wait([leaving], timeout=_HEAD_START_S)
            if await _continue(controls, engine, lost=control is None) and requests:
                await _abort_again(engine, requests)
        await asyncio.wait([leaving])
    finally:
        leaving.cancel()


async def _continue(controls: EngineControls, engine: Engine, *, lost: bool) -> bool:
    """Wake the engine if memory of it is released, and let it go on."""
    bound = _LOST_S if lost else _CONTINUE_S
    try:
        await controls.wake_up(engine)
        with watched(engine.name, "the last continue", every_s=_SAY_AFTER_S):
            async with asyncio.timeout(bound):
                await engine.resume()
    except (EngineError, TimeoutError) as error:
        why = str(error) or f"{engine.name} did not answer within {bound:g} s"
        # That a lost engine is not there was said when it was lost, and it was told to continue.
        expected = lost and isinstance(error, EngineUnreachable)
        level = logging.DEBUG if expected else logging.WARNING
        log.log(level, "the engine may be left paused, since it could not be continued: %s", why)
        return False
    return True


async def _abort_again(engine: Engine, requests: Sequence[str]) -> None:
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
