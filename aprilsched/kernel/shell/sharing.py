"""Detects other users of the same engines.

Two schedulers on one engine would each pause and refit it while the other uses it. Within one
process, the second scheduler is refused. Across processes it is refused by a claim on the server
(:class:`~aprilsched.kernel.engines.base.Claimable`), which the first one renews. Clients that make
no claim are detected by their effects: requests that an engine has when a scheduler opens, aborts
that the scheduler did not request (see :mod:`aprilsched.kernel.shell.attempts`), and an engine
that runs although the scheduler has paused it (see :mod:`aprilsched.kernel.shell.controls`). A
version that the scheduler did not load is detected in every answer of an engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from typing import ClassVar

from aprilsched.errors import ConfigError, EngineError, EngineTaken
from aprilsched.kernel.engines.base import (
    CLAIM_INTERVAL_S,
    CLAIM_S,
    Claimable,
    Engine,
    HasAddress,
    TellsPause,
)
from aprilsched.kernel.engines.load import ReportsLoad

log = logging.getLogger("aprilsched")

SHOWN = 3
"""Number of engines that a warning names."""
_AGAIN_S = 1.0
"""Seconds until an engine is asked again. SGLang's figures are some steps old, and SGLang aborts
the requests of a killed client within this time."""


class Claim:
    """The engines that one open scheduler of this process uses.

    Args:
        run_id: the scheduler's run id, for the error message that another scheduler gets.
    """

    _holders: ClassVar[dict[Hashable, Claim]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()
    """Protects `_holders`, because a blocking scheduler runs its loop in a separate thread."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engines: list[Engine] = []
        """The claimed engines. The references ensure that no other object gets the same id."""

    def take(self, engines: Iterable[Engine]) -> None:
        """Claim these engines too.

        Raises:
            ConfigError: if another open scheduler uses one of them.
        """
        self._loop = asyncio.get_running_loop()
        with self._lock:
            for engine in engines:
                holder = self._holders.get(_key(engine))
                if holder is not None and holder is not self and holder.is_open:
                    raise ConfigError(
                        f"{engine.name} is in use by the open scheduler of run "
                        f"{holder._run_id}, and two schedulers would disturb each other by pauses "
                        "and refits; close that one first."
                    )
            for engine in engines:
                self._holders[_key(engine)] = self
                self._engines.append(engine)

    def give_back(self) -> None:
        """End the claim, so that another scheduler may use the engines."""
        with self._lock:
            for engine in self._engines:
                if self._holders.get(_key(engine)) is self:
                    del self._holders[_key(engine)]
            self._engines = []

    @property
    def is_open(self) -> bool:
        """Whether the scheduler may still use engines. It cannot when its event loop is closed."""
        return self._loop is not None and not self._loop.is_closed()


async def claim(engine: Engine) -> None:
    """Claim an engine across processes; the claim of an owner that was killed is waited for.

    Raises:
        EngineTaken: if another owner renews its claim.
        EngineError: if the engine does not answer.
    """
    if not isinstance(engine, Claimable):
        return
    now = asyncio.get_running_loop().time
    end = now() + CLAIM_S + CLAIM_INTERVAL_S
    while not await engine.claim():
        if now() >= end:
            why = "is owned by another scheduler or gateway, which is alive; stop that one first, "
            raise EngineTaken(engine.name, f"{why}or use other servers.")
        log.info("%s has an owner, or had one until now; its claim is waited for", engine.name)
        await asyncio.sleep(_AGAIN_S)


async def disclaim(engine: Engine) -> None:
    """End the claim on an engine, if there is one; a failure is left to its expiry."""
    if isinstance(engine, Claimable):
        with suppress(EngineError):
            await engine.disclaim()


_PAUSE_ANSWER_S = 5.0
"""Timeout in seconds for the query whether an engine is paused."""


async def shows_pause(engine: Engine) -> bool | None:
    """Return whether a server is paused; None if not a server, or if it does not report it."""
    if isinstance(engine, TellsPause) and isinstance(engine, HasAddress):
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_PAUSE_ANSWER_S):
                return await engine.is_paused()
    return None


async def log_pause(engine: Engine) -> None:
    """Log that a server is paused, because it is continued. One that starts shows a pause too."""
    if await shows_pause(engine):
        log.warning("%s was left paused by an earlier client, or still starts", engine.name)


def _key(engine: Engine) -> Hashable:
    return engine.address if isinstance(engine, HasAddress) else id(engine)


async def say_who_is_there(engines: Sequence[Engine]) -> None:
    """Log a warning for each engine that has requests before this run has sent any."""
    found = await _busy(engines)
    if found:
        await asyncio.sleep(_AGAIN_S)
        found = await _busy([engine for engine, _ in found])
    for engine, count in found:
        log.warning(
            "%s has requests of another client (%d of them): this run's pauses and refits stop "
            "those too, and another scheduler's would stop this run's; give each its own engines",
            engine.name,
            count,
        )


async def _busy(engines: Sequence[Engine]) -> list[tuple[Engine, int]]:
    """The engines that have requests, each with their number."""
    counts = await asyncio.gather(*map(_requests, engines))
    return [(engine, count) for engine, count in zip(engines, counts, strict=True) if count]


async def _requests(engine: Engine) -> int:
    if not isinstance(engine, ReportsLoad):
        return 0
    try:
        load = await engine.load()
    except EngineError:
        return 0
    return load.running + load.queued
