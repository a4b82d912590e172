"""Polls the load of the engines of a fleet, without waiting for any of them.

Invariants: at most one load request per engine is open, so a hung engine is not polled again before
it answers or times out. An engine that does not report its load is logged once, and polled again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from aprilsched.kernel.engines.load import ReportsLoad
from aprilsched.observe.sampling.rates import Rates
from aprilsched.observe.sampling.sample_log import EngineLine

log = logging.getLogger("aprilsched")


_ANSWER_SECONDS = 10.0
"""Timeout of a load request; longer than the engine's own timeout."""
SERIES_SECONDS = 5.0
"""Seconds between two reads of a metrics endpoint. It is meant for a scrape every few seconds, and
the process that streams the responses serves it."""


class HasEngines(Protocol):
    """A fleet, whose engines may change."""

    @property
    def engines(self) -> Sequence[object]: ...


class EngineLoads:
    """Polls the engines that report their load
    (:class:`~aprilsched.kernel.engines.load.ReportsLoad`).

    Args:
        fleet: the fleet of the engines; it should be open.
        interval: seconds between two polls, on the running loop's clock.
        clock: returns the time of a sample.
        take: receives each line.
    """

    def __init__(
        self,
        fleet: HasEngines,
        interval: float,
        clock: Callable[[], float],
        take: Callable[[EngineLine], None],
    ) -> None:
        self._fleet = fleet
        self._interval = interval
        self._clock = clock
        self._take = take
        self._rates: dict[str, Rates] = {}
        self._asked: set[str] = set()
        self._failing: set[str] = set()
        self._named: set[str] = set()

    async def work(self) -> None:
        """Poll until cancelled."""
        loop = asyncio.get_running_loop()
        due = series_due = loop.time()
        async with asyncio.TaskGroup() as tasks:
            while True:
                metrics = loop.time() >= series_due
                if metrics:
                    series_due = loop.time() + SERIES_SECONDS
                for engine in self._fleet.engines:
                    name = getattr(engine, "name", "")
                    if isinstance(engine, ReportsLoad) and name not in self._asked:
                        self._asked.add(name)
                        tasks.create_task(self._ask(name, engine, metrics))
                due = max(due + self._interval, loop.time())
                await asyncio.sleep(due - loop.time())

    async def _ask(self, name: str, engine: ReportsLoad, metrics: bool) -> None:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                load = await engine.load(metrics=metrics)
            self._take(self._rates.setdefault(name, Rates()).line(name, self._clock(), load))
            self._failing.discard(name)
        except Exception as error:
            self._fail(name, str(error) or type(error).__name__)
        finally:
            self._asked.discard(name)

    def _fail(self, name: str, why: str) -> None:
        if name not in self._failing:
            self._failing.add(name)
            self._take(EngineLine(t=self._clock(), engine=name, error=why))
        if name not in self._named:
            self._named.add(name)
            log.warning("the load of %s is not sampled for now, the run continues: %s", name, why)
