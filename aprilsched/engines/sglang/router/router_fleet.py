"""A fleet of the workers of an SGLang router; the router carries the generations.

Each worker is an engine of its own, because versions, refits, pauses and losses belong to the
workers and not to the router. Control calls go to the worker. A generation goes through the router
to the worker that the scheduler chose (``roster`` finds its position, ``routed_engine`` checks it).
So the router's list of workers is used, and its own load balancing is not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

from aprilsched.engines.base import FleetChange
from aprilsched.engines.http.address import ServerAddress
from aprilsched.engines.http.limits import HttpLimits
from aprilsched.engines.sglang.engine import SGLangEngine
from aprilsched.engines.sglang.fleet import Members
from aprilsched.engines.sglang.router.roster import Roster, Worker
from aprilsched.engines.sglang.router.routed_engine import RoutedEngine
from aprilsched.errors import ConfigError, EngineError, EngineUnreachable

__all__ = ["SGLangRouterFleet"]

_log = logging.getLogger(__name__)
_LISTINGS_UNTIL_GONE = 2


class SGLangRouterFleet:
    """The workers of the router at `url`, which must have the policy consistent_hashing.

    Args:
        url: URL where the router listens, as ``http://host:port``.
        admin_key: the workers' ``--admin-api-key``, where they have one.
        api_key: the ``--api-key`` of router and workers, where they have one.
        model_path: refuse workers that serve another model; None accepts any one model.
        limits: timeouts and sizes, for the router and for each worker.
        poll_s: seconds between two requests for the router's list, for :meth:`watch`.

    Raises:
        ConfigError: if `url`, a key or `poll_s` cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        admin_key: str | None = None,
        api_key: str | None = None,
        model_path: str | None = None,
        limits: HttpLimits | None = None,
        poll_s: float = 5.0,
    ) -> None:
        if not poll_s > 0:
            raise ConfigError(f"poll_s is {poll_s}; give a number of seconds above 0.")
        self._admin_key = admin_key
        self._api_key = api_key
        self._model_path = model_path
        self._limits = limits or HttpLimits()
        self._poll_s = poll_s
        self._roster = Roster(url, api_key=api_key, limits=self._limits)
        self._members = Members((), model_path)
        self._missing: dict[str, int] = {}
        self._warned: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"SGLangRouterFleet({str(self._roster.url)!r})"

    @property
    def engines(self) -> Sequence[SGLangEngine]:
        """One engine for each worker; known after :meth:`open`."""
        return self._members.engines

    async def open(self) -> None:
        """Ask the router for its workers and open each; close all of them if anything is wrong.

        Raises:
            EngineError: if the router or a worker cannot be reached, or is another program.
            ConfigError: if the router has the wrong policy, or its workers do not agree.
        """
        self._missing, self._warned = {}, {}
        await self._roster.open()
        try:
            workers = await self._roster.workers()
            if not any(worker.is_healthy for worker in workers):
                raise EngineUnreachable(
                    self._roster.name,
                    f"lists {len(workers)} workers and none that is healthy; wait until it has "
                    "found them.",
                )
            await self._roster.check_pins()
            self._members = Members(
                [self._engine(worker) for worker in _unique(workers)], self._model_path
            )
            await self._members.open()
        except BaseException:
            await self._roster.close()
            raise

    async def close(self) -> None:
        """Close the connections to the router and to every worker."""
        await self._members.close()
        await self._roster.close()

    async def watch(self) -> AsyncGenerator[FleetChange, None]:
        """Yield the workers that the router has found or no longer lists.

        See :class:`aprilsched.engines.base.WatchesMembership`. An unhealthy worker that is still
        listed has not left. An empty list changes nothing: the router has just been started.
        """
        while True:
            await asyncio.sleep(self._poll_s)
            await self._look()
            change = self._members.take()
            if change is not None:
                yield change

    async def _look(self) -> None:
        try:
            workers = await self._roster.workers()
        except EngineError as error:
            self._warn_once(self._roster.name, str(error))
            return
        if not workers:
            self._warn_once(self._roster.name, f"the {self._roster.name} lists no worker.")
            return
        self._warned.pop(self._roster.name, None)
        listed = {ServerAddress.parse(worker.url).name: worker for worker in workers}
        for name, worker in listed.items():
            await self._take_in(name, worker)
        for engine in self.engines:
            times = 0 if engine.name in listed else self._missing.get(engine.name, 0) + 1
            self._missing[engine.name] = times
            if times >= _LISTINGS_UNTIL_GONE and len(self.engines) > 1:
                del self._missing[engine.name]
                self._members.leave(engine.name)

    async def _take_in(self, name: str, worker: Worker) -> None:
        if not worker.is_healthy or any(name == engine.name for engine in self.engines):
            return
        try:
            await self._members.join(self._engine(worker))
        except (EngineError, ConfigError) as error:
            self._warn_once(name, str(error))
        else:
            self._warned.pop(name, None)

    def _warn_once(self, about: str, what: str) -> None:
        """Log a problem once, not at every look."""
        if self._warned.get(about) != what:
            self._warned[about] = what
            _log.warning("the fleet stays as it is: %s", what)

    def _engine(self, worker: Worker) -> RoutedEngine:
        return RoutedEngine(
            worker.url,
            self._roster,
            lambda: self.engines,
            admin_key=self._admin_key,
            api_key=self._api_key,
            limits=self._limits,
        )


def _unique(workers: Sequence[Worker]) -> list[Worker]:
    """Drop duplicates: the router lists a worker of several models several times."""
    return list({ServerAddress.parse(worker.url).name: worker for worker in workers}.values())
