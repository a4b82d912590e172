"""What is known of others who use the same engines, and what is done about it.

Two schedulers on one engine pause and refit it under each other. Within one process the second one
is refused. What another process does is seen only by its traces: requests that are there when a
scheduler opens, and aborts that it did not ask for (a version that it did not bring in is seen
elsewhere, in every answer).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import ClassVar

from aprilsched.engines.base import Engine, HasAddress
from aprilsched.engines.load import ReportsLoad
from aprilsched.errors import ConfigError, EngineError

__all__ = ["Claim", "say_who_is_there"]

log = logging.getLogger("aprilsched")

_AGAIN_S = 1.0
"""Until an engine is asked once more. SGLang's figures are some steps old, and requests that a
killed client left are aborted within that time."""


class Claim:
    """The engines that one open scheduler of this process uses.

    Args:
        run_id: of the scheduler, for the message to the other one.
    """

    _holders: ClassVar[dict[Hashable, Claim]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()
    """The blocking facade has a loop in a thread of its own."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engines: list[Engine] = []
        """Held, so that no other object gets the identity of one of them."""

    def take(self, engines: Iterable[Engine]) -> None:
        """Take these too.

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
                        f"{holder._run_id}, and two would pause and refit it under each other; "
                        "close that one first."
                    )
            for engine in engines:
                self._holders[_key(engine)] = self
                self._engines.append(engine)

    def give_back(self) -> None:
        """Whoever comes next may have them."""
        with self._lock:
            for engine in self._engines:
                if self._holders.get(_key(engine)) is self:
                    del self._holders[_key(engine)]
            self._engines = []

    @property
    def is_open(self) -> bool:
        """A scheduler whose loop was closed under it uses nothing any more."""
        return self._loop is not None and not self._loop.is_closed()


def _key(engine: Engine) -> Hashable:
    return engine.address if isinstance(engine, HasAddress) else id(engine)


async def say_who_is_there(engines: Sequence[Engine]) -> None:
    """Log a line for each engine that works for somebody else before anything is sent to it."""
    found = await _busy(engines)
    if found:
        await asyncio.sleep(_AGAIN_S)
        found = await _busy([engine for engine, _ in found])
    for engine, count in found:
        log.warning(
            "%s has requests of somebody else (%d of them): this run's pauses and refits stop "
            "those too, and another scheduler's would stop this run's",
            engine.name,
            count,
        )


async def _busy(engines: Sequence[Engine]) -> list[tuple[Engine, int]]:
    """The engines that have requests, and how many."""
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
