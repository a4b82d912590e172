"""Watches all engines: their versions, where somebody else moves the weights, and their KV pools,
where requests move from full ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import datetime, timedelta

from aprilsched.coordinator.tasks import Part, Shell
from aprilsched.core.messages import events as ev
from aprilsched.core.messages import facts
from aprilsched.engines.base import Engine, ReportsLoad, TellsPause
from aprilsched.errors import EngineError, FleetLost, InconsistentWeights, RefitError

_INTERVAL_S = 1.0
_ANSWER_S = 10.0
"""Seconds that an engine has for an answer. One that does not answer is no matter of this watch."""
_AT_ONCE = 32


class Watch(Part):
    """Asks every engine something once a second, and tells the core the answers."""

    def __init__(self, shell: Shell, ask: Callable[[Engine], Awaitable[ev.Event | None]]) -> None:
        super().__init__(shell)
        self._ask = ask
        self._limit = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            async with asyncio.TaskGroup() as group:
                for engine in list(self._engines.values()):
                    group.create_task(self._look(engine))

    async def _look(self, engine: Engine) -> None:
        async with self._limit:
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    seen = await self._ask(engine)
                if seen is not None:
                    self._feed(seen)


async def ask_version(engine: Engine, *, silent: bool) -> ev.VersionSeen:
    """Ask an engine for its version, and whether it is paused if it is `silent`.

    The labels on tokens are not enough: an engine without requests sends none, and a trainer that
    waits for the next version launches none.
    """
    paused = None
    if isinstance(engine, TellsPause) and silent:
        paused = await engine.is_paused()
    version: int | None = None
    with suppress(InconsistentWeights):
        version = await engine.version()
    return ev.VersionSeen(engine=engine.name, version=version, paused=paused)


async def ask_load(engine: Engine) -> ev.LoadSeen | None:
    """Ask an engine that reports its load how full its KV pool is."""
    if not isinstance(engine, ReportsLoad):
        return None
    load = await engine.load()
    if load.kv_tokens is None or load.age_s > _INTERVAL_S:
        return None
    return ev.LoadSeen(engine=engine.name, used=load.kv_tokens, queued=load.queued)


# --- outages -------------------------------------------------------------------------------------

# Reports slow engines and the loss of the whole fleet, in the log and to waiting calls.

log = logging.getLogger("aprilsched")


def report_slow(command: facts.EngineSlow) -> None:
    """Log that an engine is slow."""
    log.warning(
        "engine %s is slow: %s; it stays in use, because there is no other engine to compare it "
        "with",
        command.engine,
        command.cause,
    )


def report_outage(command: facts.FleetAwaited) -> None:
    """Log that no engine is left, and until when one may come back."""
    now = datetime.now().astimezone()
    log.error(
        "no engine is left since %s; the scheduler waits until %s for one to come back: %s",
        _clock(now - timedelta(seconds=command.waited_s)),
        _clock(now + timedelta(seconds=command.left_s)),
        _causes(command.lost),
    )


def fleet_lost(command: facts.FleetGivenUp) -> FleetLost:
    """The error for every call, when no engine has come back."""
    return FleetLost(
        f"no engine is left and none came back within {command.waited_s:.0f} s "
        f"({_causes(command.lost)}); restart the servers, or raise health.fleet_wait_s."
    )


def wants_update(engines: Iterable[str], version: int, base: int | None) -> RefitError:
    """The error for a call that waits for tokens which no engine can generate before an update.

    Args:
        engines: names of the engines that are there.
        version: the fleet's version.
        base: the full model that the fleet's adapters belong to; None without adapters.
    """
    whole = (
        "" if base is None else f", as a full model where an engine does not have version {base}"
    )
    return RefitError(
        f"no engine has the fleet's weights ({', '.join(engines)} wait for them); call "
        f"update_weights(publisher, version={version}), or with newer ones, first{whole}."
    )


def _clock(when: datetime) -> str:
    return when.strftime("%H:%M:%S")


def _causes(lost: tuple[tuple[str, str], ...]) -> str:
    return "; ".join(f"{engine}: {cause}" for engine, cause in lost)
