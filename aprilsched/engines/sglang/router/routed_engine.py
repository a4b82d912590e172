"""One worker of a router: generations go through the router, control calls go to the worker.

- A generation is sent to the worker's position in the router's list, and the position is looked
  up again after the router has answered. If it changed meanwhile, nobody knows which worker has
  the request: it is aborted on all of them, its connection is closed, and it counts as failed.
- The router rewrites a request and leaves out parameters that it does not know. A request with a
  parameter that would be lost in this way is refused.
- A request that a pause holds is ended only by closing its connection: the router notices that at
  the first token after the pause, and the worker then aborts the request. An earlier abort would
  be lost, and SGLang would not pass a later one on (see ``calls``).
- A worker that the router does not consider healthy counts as unreachable; it was sent nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp

from aprilsched.engines.base import GenerationRequest
from aprilsched.engines.http.failures import engine_error, quoted
from aprilsched.engines.http.limits import HttpLimits
from aprilsched.engines.http.transport import Transport
from aprilsched.engines.sglang.calls import HungUp, despite_cancellation
from aprilsched.engines.sglang.engine import SGLangEngine
from aprilsched.engines.sglang.router.roster import ERROR_CODE, TARGET, Roster
from aprilsched.engines.sglang.wire import generate_body
from aprilsched.errors import EngineError, EngineProtocolError, EngineRejected, EngineUnreachable

ROUTING_KEY = "x-smg-routing-key"
_BAD_REQUEST = 400
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

    def _sent(
        self, request: GenerationRequest
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._routed(request)

    @asynccontextmanager
    async def _routed(self, request: GenerationRequest) -> AsyncGenerator[aiohttp.ClientResponse]:
        self._check_sampling(request)
        position = await self._position()
        headers = {TARGET: str(position), ROUTING_KEY: str(request.affinity)}
        # The router would drop an interval, so the worker's own --stream-interval holds.
        body = generate_body(request, stream_interval=None)
        response = None
        try:
            response = await self._through.stream("generate", body, headers=headers)
            async with response:
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
                f"the {self._roster.name} answered {response.status} ({quoted(code)}) "
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
        lost = sorted(request.sampling.extra.keys() - _PASSED_ON)
        if lost:
            raise EngineRejected(
                self.name,
                f"the {self._roster.name} does not pass on the sampling parameters "
                f"{', '.join(lost)}; leave them out, or use SGLangFleet without the router.",
                status=_BAD_REQUEST,
            )
