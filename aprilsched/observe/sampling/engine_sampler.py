"""Asks the engines of a fleet for their load at regular times, without waiting for any of them.

Invariants: an engine has one open question at a time, so one that hangs is not asked again before
it answers or its time is over. An engine that does not tell its load is named once, and is asked
again.
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
"""More than the time that an engine allows itself."""
SERIES_SECONDS = 5.0
"""Seconds between two looks at a metrics endpoint. Its page is made for a scrape every few seconds,
by the same process that streams the responses."""


class HasEngines(Protocol):
    """A fleet, whose engines may change."""

    @property
    def engines(self) -> Sequence[object]: ...


class EngineLoads:
    """Asks the engines that tell their load (:class:`~aprilsched.kernel.engines.load.ReportsLoad`).

    Args:
        fleet: the fleet of the engines; it should be open.
        interval: seconds between two questions, on the running loop's clock.
        clock: gives the time of a sample.
        take: is called with each line.
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
        """Ask until this is cancelled."""
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
            log.warning("the load of %s is not sampled for now, the run goes on: %s", name, why)
