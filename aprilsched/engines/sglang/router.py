"""The workers of an SGLang router as a fleet: generations go through the router to a chosen worker.

Each worker is an engine of its own, because versions, refits, pauses and losses belong to the
workers and not to the router. Control calls go to the worker. A generation goes through the router
to the worker that the scheduler chose (:class:`Roster` finds its position, :class:`RoutedEngine`
checks it). So the router's list of workers is used, and its own load balancing is not.

sglang-router 0.3.2 sends a request to the worker whose *position* is in a header. The position
counts from 0 over the healthy workers, in the order of GET /workers (measured). It changes
whenever a worker comes, goes or changes its health, so it is looked up for each request and never
remembered. Only the policy consistent_hashing reads the header.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import aiohttp
import msgspec

from aprilsched.engines.base import GenerationRequest
from aprilsched.engines.fleet import PolledFleet
from aprilsched.engines.http import HttpLimits, ServerAddress, Transport, engine_error, quote
from aprilsched.engines.server import HungUp, Questions, despite_cancellation
from aprilsched.engines.sglang.http_engine import SGLangEngine
from aprilsched.engines.sglang.wire import generate_body
from aprilsched.errors import (
    ConfigError,
    ControlTimeout,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
)

__all__ = [
    "ERROR_CODE",
    "TARGET",
    "Roster",
    "RoutedEngine",
    "SGLangRouterFleet",
    "Worker",
]


TARGET = "x-smg-target-worker"
ERROR_CODE = "x-smg-error-code"
"""Header of an answer that comes from the router itself and not from a worker."""
_NOBODY = "none"
_MAX_WORKERS = 4096


class Worker(msgspec.Struct, frozen=True):
    """One worker as the router lists it."""

    url: str
    is_healthy: bool
    worker_type: str = "regular"


class _Listing(msgspec.Struct, frozen=True):
    workers: list[Worker]


class Roster:
    """The list of the router at `url`; its connections belong to one loop from open to close."""

    def __init__(self, url: str, *, api_key: str | None, limits: HttpLimits) -> None:
        address = ServerAddress.parse(url)
        self.url = address.url
        self.name = f"router {address.name}"
        self._transport = Transport(
            self.name, self.url, admin_key=None, api_key=api_key, limits=limits
        )
        self._asked = Questions(self.name, "SGLang", self._transport, limits.control_timeout)
        self._asking = asyncio.Lock()
        self._listings = 0
        """Number of listings that have begun."""
        self._found: Sequence[Worker] | EngineError | None = None
        """What the latest one has found; None while it goes on."""

    async def open(self) -> None:
        """Make the connections; nothing is sent."""
        self._asking = asyncio.Lock()  # An older one may be bound to an earlier loop.
        await self._transport.open()

    async def close(self) -> None:
        """Drop the connections; a listing that goes on fails."""
        await self._transport.close()

    async def workers(self) -> Sequence[Worker]:
        """List the workers; the listing begins after the call, and concurrent callers share it.

        Raises:
            EngineError: if the router does not answer.
            EngineProtocolError: if a worker is not an HTTP server that generates by itself.
        """
        before = self._listings
        async with self._asking:
            if self._listings == before or self._found is None:
                self._found = None
                await asyncio.sleep(0)  # All who ask in this turn of the loop share the listing.
                self._listings += 1
                try:
                    self._found = await self._ask()
                except EngineError as error:  # All who wait for this listing get it.
                    self._found = error
            if isinstance(self._found, EngineError):
                raise self._found
            return self._found

    async def position(self, url: str) -> int | None:
        """The position of a worker among the healthy ones now; None if it is not one of them."""
        healthy = [worker.url for worker in await self.workers() if worker.is_healthy]
        return healthy.index(url) if url in healthy else None

    async def check_pins(self) -> None:
        """Refuse a router that does not send a request to the worker in its header.

        The router must refuse a request to a worker that does not exist. If it does not, the
        request costs one token.

        Raises:
            ConfigError: if it does not; the message says with which policy to start the router.
        """
        wrong = ConfigError(
            f"The {self.name} ignores which worker a request is for; start it with the policy "
            "consistent_hashing."
        )
        try:
            answer = await self._transport.call(
                "POST",
                "generate",
                {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}},
                timeout=self._asked.timeout,
                accept=(200, 400, 500, 503),
                repeatable=False,
                admin=False,
                headers={TARGET: _NOBODY},
            )
        except ControlTimeout as error:
            raise wrong from error
        if answer.status != 503 or b"no_available_workers" not in answer.body:
            raise wrong

    async def _ask(self) -> list[Worker]:
        try:
            workers = (await self._asked.get("workers", _Listing)).workers
        except EngineRejected as error:
            if error.status != 404:
                raise
            raise EngineProtocolError(
                self.name, "has no GET /workers; give the URL of an sglang-router of 0.3 or later."
            ) from error
        if len(workers) > _MAX_WORKERS:
            raise EngineProtocolError(
                self.name, f"lists {len(workers)} workers; use a router of at most {_MAX_WORKERS}."
            )
        for worker in workers:
            self._check(worker)
        return workers

    def _check(self, worker: Worker) -> None:
        if worker.worker_type != "regular":
            raise EngineProtocolError(
                self.name,
                f"lists a {worker.worker_type[:40]} worker; start it without prefill-decode "
                "disaggregation.",
            )
        try:
            ServerAddress.parse(worker.url)
        except ConfigError as error:
            raise EngineProtocolError(
                self.name,
                "lists a worker that is not a plain http(s) URL; start it with HTTP workers and "
                "without --dp-aware.",
            ) from error


# --- routed engine -------------------------------------------------------------------------------

# One worker of a router: generations go through the router, control calls go to the worker.
#
# - A generation is sent to the worker's position in the router's list, and the position is looked
#   up again after the router has answered. If it changed meanwhile, nobody knows which worker has
#   the request: it is aborted on all of them, its connection is closed, and it counts as failed.
# - The router rewrites a request and leaves out parameters that it does not know. A request with a
#   parameter that would be lost in this way is refused.
# - A request that a pause holds is ended only by closing its connection: the router notices that at
#   the first token after the pause, and the worker then aborts the request. An earlier abort would
#   be lost, and SGLang would not pass a later one on (see ``engines/server.py``).
# - A worker that the router does not consider healthy counts as unreachable; it was sent nothing.

ROUTING_KEY = "x-smg-routing-key"
_SERVER_ERROR = 500
_NO_WORKER = "no_available_workers"

# fmt: off
_PASSED_ON = frozenset({
    "ebnf", "frequency_penalty", "json_schema", "n", "no_stop_trim", "presence_penalty", "regex",
    "repetition_penalty", "skip_special_tokens", "stop",
})
# fmt: on
"""Sampling parameters of `extra` that sglang-router 0.3.2 passes on to the worker."""


class RoutedEngine(SGLangEngine):
    """The worker at `url` of the router of `roster`.

    Args:
        url: the worker's URL as the router lists it.
        roster: the list of workers of the router.
        peers: gives all current workers, on which a misrouted request is aborted.
        admin_key: the worker's ``--admin-api-key``.
        api_key: the ``--api-key`` of router and workers; the router passes it on.
        limits: timeouts and sizes.
    """

    _shares = False  # The router chooses a worker for a whole body.

    def __init__(
        self,
        url: str,
        roster: Roster,
        peers: Callable[[], Sequence[SGLangEngine]],
        *,
        admin_key: str | None = None,
        api_key: str | None = None,
        limits: HttpLimits | None = None,
    ) -> None:
        super().__init__(url, admin_key=admin_key, api_key=api_key, limits=limits)
        self._listed = url
        self._roster = roster
        self._peers = peers
        self._unheard: set[str] = set()
        """Requests that were left before anything had arrived, until they are aborted."""
        self._through = Transport(
            self.name, roster.url, admin_key=None, api_key=api_key, limits=self._limits
        )

    def __repr__(self) -> str:
        return f"RoutedEngine({self._listed!r}, {self._roster.name!r})"

    async def open(self) -> None:
        """Connect to the worker itself and probe it."""
        await super().open()
        try:
            if not self.capabilities.version_spans:
                raise EngineProtocolError(
                    self.name,
                    "does not report the version of each token, which a fleet behind a router "
                    "needs; use SGLang 0.5.19 or later, or SGLangFleet without the router.",
                )
            await self._through.open()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Release the connections to the worker and the router."""
        await super().close()
        await self._through.close()

    async def abort(self, request_id: str) -> None:
        """End one request; for one that a pause holds, only close its connection."""
        call = self._calls.get(request_id)
        if call is not None and call.silent and await self.is_paused() and call.silent:
            call.break_off(HungUp())
        else:
            await super().abort(request_id)

    async def _last_abort(self, request_id: str) -> None:
        if request_id in self._unheard:
            self._unheard.discard(request_id)
            if await self._is_paused_perhaps():
                return
        await super()._last_abort(request_id)

    async def _is_paused_perhaps(self) -> bool:
        try:
            async with asyncio.timeout(self._limits.abort_timeout):
                return bool(await self.is_paused())
        except (EngineError, TimeoutError):
            return False

    def _send(
        self, request: GenerationRequest
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._route(request)

    @asynccontextmanager
    async def _route(self, request: GenerationRequest) -> AsyncGenerator[aiohttp.ClientResponse]:
        self._check_sampling(request)
        position = await self._position()
        headers = {TARGET: str(position), ROUTING_KEY: str(request.affinity)}
        # The router would drop an interval, so the worker's own --stream-interval holds.
        body = generate_body(request, stream_interval=None)
        response = None
        try:
            async with self._through.stream("generate", body, headers=headers) as response:
                await self._check_answer(request, response, position)
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise engine_error(self._roster.name, self._roster.url, error) from error
        except (EngineRejected, EngineUnreachable):
            raise
        except BaseException:
            if response is None or response.content.total_bytes == 0:
                self._unheard.add(request.request_id)
            raise

    async def _check_answer(
        self, request: GenerationRequest, response: aiohttp.ClientResponse, position: int
    ) -> None:
        code = response.headers.get(ERROR_CODE)
        if code == _NO_WORKER:
            raise self._not_listed()
        if code is not None and response.status >= _SERVER_ERROR:
            # The worker may have the request all the same, so this does not count as a refusal.
            raise EngineError(
                self.name,
                f"the {self._roster.name} answered {response.status} ({quote(code)}) "
                "in its place; is it up, and reached from there?",
            )
        if response.status == 200 and not await self._is_still_at(position):
            await despite_cancellation(self._abort_everywhere(request.request_id))
            raise EngineError(
                self.name,
                f"the workers of the {self._roster.name} changed while request "
                f"{request.request_id} was on its way; it is sent again.",
            )

    async def _position(self) -> int:
        position = await self._roster.position(self._listed)
        if position is None:
            raise self._not_listed()
        return position

    async def _is_still_at(self, position: int) -> bool:
        try:
            return await self._roster.position(self._listed) == position
        except EngineError:
            return False

    def _not_listed(self) -> EngineUnreachable:
        return EngineUnreachable(
            self.name,
            f"the {self._roster.name} has no such healthy worker now; start it with "
            "--disable-health-check, so that a pause is not taken for a failure.",
        )

    async def _abort_everywhere(self, request_id: str) -> None:
        await asyncio.gather(*(peer._abort_quietly(request_id) for peer in self._peers()))

    def _check_sampling(self, request: GenerationRequest) -> None:
        lost = sorted(
            (request.sampling.extra.keys() - _PASSED_ON)
            | request.sampling.request.keys()
            | {f"{media.kind}_data" for media in request.media}
        )
        if lost:
            raise self._refused(
                request,
                f"has {', '.join(lost)}, which the {self._roster.name} does not pass on; leave "
                "that out, or use SGLangFleet without the router.",
            )


# --- router fleet --------------------------------------------------------------------------------


class SGLangRouterFleet(PolledFleet[RoutedEngine]):
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
        super().__init__(model_path, poll_s)
        limits = limits or HttpLimits()
        self._roster = Roster(url, api_key=api_key, limits=limits)
        self._engine = partial(
            RoutedEngine,
            roster=self._roster,
            peers=lambda: self.engines,
            admin_key=admin_key,
            api_key=api_key,
            limits=limits,
        )

    def __repr__(self) -> str:
        return f"SGLangRouterFleet({str(self._roster.url)!r})"

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
            # The router lists a worker of several models several times.
            urls = {ServerAddress.parse(worker.url).name: worker.url for worker in workers}
            await self._open_all(map(self._engine, urls.values()))
        except BaseException:
            await self._roster.close()
            raise

    async def close(self) -> None:
        """Close the connections to the router and to every worker."""
        await super().close()
        await self._roster.close()

    async def _list(self) -> Mapping[str, Callable[[], RoutedEngine] | None]:
        """An unhealthy worker that is still listed has not left. An empty list changes nothing: the
        router has just been started."""
        workers = await self._roster.workers()
        if not workers:
            raise EngineUnreachable(self._roster.name, "lists no worker.")
        return {
            ServerAddress.parse(worker.url).name: partial(self._engine, worker.url)
            if worker.is_healthy
            else None
            for worker in workers
        }
