"""A fleet of the workers of an SGLang router; the router carries the generations.

Each worker is an engine of its own, because versions, refits, pauses and losses belong to the
workers and not to the router. Control calls go to the worker. A generation goes through the router
to the worker that the scheduler chose (``roster`` finds its position, ``routed_engine`` checks it).
So the router's list of workers is used, and its own load balancing is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from aprilsched.engines.base import FleetChange
from aprilsched.engines.http.address import ServerAddress
from aprilsched.engines.http.limits import HttpLimits
from aprilsched.engines.sglang.engine import SGLangEngine
from aprilsched.engines.sglang.fleet import ListedMembers
from aprilsched.engines.sglang.router.roster import Roster, Worker
from aprilsched.engines.sglang.router.routed_engine import RoutedEngine
from aprilsched.errors import ConfigError, EngineError, EngineUnreachable


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
        self._listed = ListedMembers((), model_path)

    def __repr__(self) -> str:
        return f"SGLangRouterFleet({str(self._roster.url)!r})"

    @property
    def engines(self) -> Sequence[SGLangEngine]:
        """One engine for each worker; known after :meth:`open`."""
        return self._listed.members.engines

    async def open(self) -> None:
        """Ask the router for its workers and open each; close all of them if anything is wrong.

        Raises:
            EngineError: if the router or a worker cannot be reached, or is another program.
            ConfigError: if the router has the wrong policy, or its workers do not agree.
        """
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
            self._listed = ListedMembers(
                [self._engine(worker) for worker in _unique(workers)], self._model_path
            )
            await self._listed.members.open()
        except BaseException:
            await self._roster.close()
            raise

    async def close(self) -> None:
        """Close the connections to the router and to every worker."""
        await self._listed.members.close()
        await self._roster.close()

    async def watch(self) -> AsyncGenerator[FleetChange, None]:
        """Yield the workers that the router has found or no longer lists.

        See :class:`aprilsched.engines.base.WatchesMembership`. An unhealthy worker that is still
        listed has not left. An empty list changes nothing: the router has just been started.
        """
        while True:
            await asyncio.sleep(self._poll_s)
            await self._look()
            change = self._listed.members.take()
            if change is not None:
                yield change

    async def _look(self) -> None:
        try:
            workers = await self._roster.workers()
        except EngineError as error:
            self._listed.warn_once(self._roster.name, str(error))
            return
        if not workers:
            self._listed.warn_once(self._roster.name, f"the {self._roster.name} lists no worker.")
            return
        self._listed.fine(self._roster.name)
        listed = {ServerAddress.parse(worker.url).name: worker for worker in workers}
        await self._listed.follow(
            {
                name: (lambda worker=worker: self._engine(worker)) if worker.is_healthy else None
                for name, worker in listed.items()
            }
        )

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
