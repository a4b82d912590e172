"""Leaving the engines as they were: nothing of ours decoding, nothing paused, within a bound.

Each engine is left on its own, so that one that hangs holds up no other. Its streams are left
first: that closes their connections, and each tells the engine to abort its request. An engine
that is not running is then told to continue, whatever became of the aborts: that call has a bound
of its own. How long the rest takes is bounded by how much there is to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aprilsched.coordinator.attempts import Attempts
from aprilsched.coordinator.controls import EngineControls
from aprilsched.coordinator.handback import HEAD_START_S, HandBack, abort_again
from aprilsched.coordinator.watchdog import watched
from aprilsched.core.state.engine_control import Mode
from aprilsched.core.state.state import SchedulerState
from aprilsched.engines.base import Engine
from aprilsched.errors import EngineError, EngineUnreachable

__all__ = ["release"]

log = logging.getLogger("aprilsched")

_CONTINUE_S = 10.0
"""For the continue. A server on a busy machine answers within one or two seconds."""
_LOST_S = 1.0
"""The same, for an engine that was given up before."""
_SAY_AFTER_S = 2.0


async def release(
    attempts: Attempts,
    controls: EngineControls,
    hand_back: HandBack,
    engines: Mapping[str, Engine],
    state: SchedulerState,
) -> None:
    """Leave what is open on every engine and let it go on, all engines at the same time, those
    included that have left the fleet and have not been handed back.

    A cancellation does not cut this short; it is raised at the end.

    Raises:
        CancelledError: if this was cancelled, or if an engine may not have been released, because
            its task was cancelled or a KeyboardInterrupt came up in it.
    """
    attempts.stop_sending()
    running = {
        asyncio.ensure_future(
            _release(
                attempts,
                controls,
                hand_back,
                engine,
                state,
                left=engines.get(engine.name) is not engine,
            )
        )
        for engine in {**engines, **hand_back.owed}.values()
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
    attempts: Attempts,
    controls: EngineControls,
    hand_back: HandBack,
    engine: Engine,
    state: SchedulerState,
    *,
    left: bool,
) -> None:
    control = state.fleet.control.of(engine.name)
    # One that has left the fleet is as well as any.
    lost = control is None and not left
    requests = attempts.open_ids(engine.name)
    leaving = asyncio.ensure_future(attempts.leave(engine.name))
    try:
        if control is None or control.mode is not Mode.RUNNING:
            await asyncio.wait([leaving], timeout=HEAD_START_S)
            await hand_back.quiet(engine.name)
            if await _continue(controls, engine, lost=lost) and requests:
                await abort_again(engine, requests)
        await asyncio.wait([leaving])
    finally:
        leaving.cancel()


async def _continue(controls: EngineControls, engine: Engine, *, lost: bool) -> bool:
    """Wake the engine if memory of it is released, and let it go on."""
    bound = _LOST_S if lost else _CONTINUE_S
    try:
        if await controls.wake_up(engine):
            bound = _CONTINUE_S
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
