"""Leaving the engines as they were: nothing of ours decoding, nothing paused, within a bound."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aprilsched.coordinator.attempts import Attempts
from aprilsched.core.control import Mode
from aprilsched.core.state import SchedulerState
from aprilsched.engines.base import Engine
from aprilsched.engines.refit import SleepingEngine
from aprilsched.errors import EngineError

__all__ = ["release"]

log = logging.getLogger("aprilsched")

_BOUND_S = 0.8
"""Ctrl-C promises to end within a second."""


async def release(attempts: Attempts, engines: Mapping[str, Engine], state: SchedulerState) -> None:
    """Abort what is open on every engine and let it go on, all engines at the same time."""
    attempts.stop_sending()
    try:
        async with asyncio.timeout(_BOUND_S):
            await asyncio.gather(*(_release(attempts, e, state) for e in engines.values()))
    except TimeoutError:
        names = ", ".join(engines)
        log.warning("%s: not everything could be aborted within %g s", names, _BOUND_S)


async def _release(attempts: Attempts, engine: Engine, state: SchedulerState) -> None:
    control = state.control.of(engine.name)
    # An abort that fails, or is not answered, must not keep the continue from being tried.
    await _abort_open(attempts, engine)
    if control is not None and control.mode is Mode.RUNNING:
        return
    try:
        if control is not None and control.released and isinstance(engine, SleepingEngine):
            await engine.wake(sorted(control.released))
        await engine.resume()
    except EngineError as error:
        log.warning("could not be told to continue: %s", error)
    else:
        # An abort is lost on requests that an in-place pause or a hold kept back (hazards 4 and
        # 5): after the continue it counts.
        await _abort_open(attempts, engine)


async def _abort_open(attempts: Attempts, engine: Engine) -> None:
    names = attempts.open_ids(engine.name)
    try:
        async with asyncio.timeout(_BOUND_S / 3):
            await asyncio.gather(*(engine.abort(name) for name in names))
    except (EngineError, TimeoutError) as error:
        why = str(error) or f"{engine.name} does not answer"
        log.warning("not all of %d requests could be aborted: %s", len(names), why)
