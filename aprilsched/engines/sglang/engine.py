"""One SGLang server as an :class:`~aprilsched.engines.base.Engine`.

- A generation is sent once. When its stream is left before the last chunk, even by a
  cancellation, the server is told in bounded time to abort it.
- Only a failure to connect is reported as :class:`~aprilsched.errors.EngineUnreachable`: after it
  the call can be repeated, because two copies of the request cannot decode.
- Streams have no timeout; control calls always have one. The size of a stream is bounded by what
  was asked for; what follows the last chunk or an error status is bounded to a few KiB and seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, suppress

import aiohttp

from aprilsched.engines.base import Chunk, GenerationRequest
from aprilsched.engines.http.address import ServerAddress
from aprilsched.engines.http.failures import Answer, engine_error, rejection
from aprilsched.engines.http.limits import HttpLimits
from aprilsched.engines.http.sockets import inflow_of
from aprilsched.engines.http.sse import Allowance, UnfinishedEvents
from aprilsched.engines.http.transport import Transport
from aprilsched.engines.sglang.calls import (
    ABORTS_AT_ONCE,
    Call,
    EarlyAborts,
    HungUp,
    despite_cancellation,
)
from aprilsched.engines.sglang.probe import probe
from aprilsched.engines.sglang.refit import ServerRefit
from aprilsched.engines.sglang.stream import ChunkAssembler, nothing, read_chunks
from aprilsched.engines.sglang.wire import generate_body
from aprilsched.errors import ConfigError, EngineError, EngineRejected, EngineUnreachable

_log = logging.getLogger(__name__)
_DRAIN_SECONDS = 1.0
_DRAIN_BYTES = 2**16


class SGLangEngine(ServerRefit):
    """One SGLang server.

    Args:
        url: URL where the server listens, as ``http://host:port``.
        admin_key: the server's ``--admin-api-key``, for control calls.
        api_key: the server's ``--api-key``, for generation.
        stream_interval: tokens between two events of a stream. A request that is lost with
            its server, or aborted after a retract, loses at most this number of tokens.
        limits: timeouts and sizes.
        first_version: version of the weights that the server labels "0".

    Raises:
        ConfigError: if `url`, a key or `stream_interval` cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        admin_key: str | None = None,
        api_key: str | None = None,
        stream_interval: int = 64,
        limits: HttpLimits | None = None,
        first_version: int = 0,
    ) -> None:
        if stream_interval < 1:
            raise ConfigError(f"stream_interval is {stream_interval}; give 1 token or more.")
        self._url = ServerAddress.parse(url).url
        self._stream_interval = stream_interval
        self._calls: dict[str, Call] = {}
        limits = limits or HttpLimits()
        name = ServerAddress.parse(url).name
        self._transport = Transport(
            name, self._url, admin_key=admin_key, api_key=api_key, limits=limits
        )
        self._unfinished = UnfinishedEvents(name, limits.max_unfinished_bytes)
        super().__init__(name, self._transport, limits, first_version=first_version)
        self._bind_to_loop()

    def _bind_to_loop(self) -> None:
        # A semaphore belongs to the loop in which a task first waits for it.
        self._aborts = asyncio.Semaphore(ABORTS_AT_ONCE)
        self._early_aborts = EarlyAborts(self.name, self._limits.abort_timeout, self._aborts)

    @property
    def address(self) -> str:
        """The URL of the server."""
        return str(self._url)

    def __repr__(self) -> str:
        return f"SGLangEngine({str(self._url)!r})"

    async def open(self) -> None:
        """Connect and probe; close the connections again if the server cannot be used."""
        await self._transport.open()
        self._bind_to_loop()
        self._groups.clear()
        try:
            self._facts = await probe(self.name, self._transport, self._limits.control_timeout)
            await self._forget_releases_of_prior_run()
        except BaseException:
            await self._transport.close()
            raise
        if self._facts.incremental is False:
            _log.warning(
                "%s streams cumulatively, which costs the square of a response's length; start "
                "it with --incremental-streaming-output.",
                self.name,
            )

    async def close(self) -> None:
        """Release the connections; the streams that are open end with an error."""
        for call in self._calls.values():
            call.break_off(EngineError(self.name, "was closed while it generated."))
        await self._transport.close()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one response; see :meth:`aprilsched.engines.base.Engine.generate`."""
        self._check_ids(request)
        call = self._calls[request.request_id] = Call()
        try:
            async with self._sent(request) as response:
                call.attach(response)
                await self._check_status(response)
                async with aclosing(self._chunks(request, response)) as chunks:
                    async for chunk in chunks:
                        if chunk.finish is not None:
                            call.over = True
                            await _drain(response)
                        yield chunk
        except HungUp:
            yield nothing(spans_known=self.capabilities.version_spans)
        except (EngineRejected, EngineUnreachable):
            # The server does not have the request. An abort could end another one of this id.
            call.over = True
            raise
        except (aiohttp.ClientError, OSError) as error:
            failure = engine_error(self.name, self._url, error)
            call.over = isinstance(failure, EngineUnreachable)
            raise failure from error
        finally:
            if self._calls.get(request.request_id) is call:
                del self._calls[request.request_id]
            if not call.over:
                await despite_cancellation(self._abort_quietly(request.request_id))

    async def _abort_quietly(self, request_id: str) -> None:
        """Tell the server to abort a generation that nobody reads any more."""
        await self._early_aborts.send(lambda: self._last_abort(request_id))

    async def _last_abort(self, request_id: str) -> None:
        await self._abort(request_id, self._limits.abort_timeout)

    async def abort(self, request_id: str) -> None:
        """End one request; if nothing has arrived from it, its connection is closed as well."""
        call = self._calls.get(request_id)
        if call is not None and call.silent:
            call.break_off(HungUp())
        async with self._aborts:
            await self._abort(request_id, self._limits.control_timeout)

    def _sent(
        self, request: GenerationRequest
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The response to the one POST that asks for `request`."""
        interval = self._stream_interval if self.facts.stream_interval else None
        return self._transport.stream("generate", generate_body(request, stream_interval=interval))

    async def _check_status(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        body = b""
        # The status alone is enough for the error if the body does not end in time.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.control_timeout):
                body = await self._transport.read(response)
        raise rejection(self.name, "POST /generate", Answer(response.status, body))

    def _chunks(
        self, request: GenerationRequest, response: aiohttp.ClientResponse
    ) -> AsyncGenerator[Chunk, None]:
        name, limits = request.request_id, self._limits
        allowance = Allowance(
            self.name,
            name,
            limits.max_answer_bytes,
            self._unfinished,
            inflow_of(response),
        )
        assembler = ChunkAssembler(
            self.name,
            name,
            request.sampling.max_new_tokens,
            first_version=self._first_version,
        )
        return read_chunks(response.content.readany, allowance, assembler)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read what follows the last chunk, so that the connection can be used again."""
    left = _DRAIN_BYTES
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for data in response.content.iter_any():
                left -= len(data)
                if left < 0:
                    response.close()
                    return
    except (aiohttp.ClientError, OSError):
        response.close()
