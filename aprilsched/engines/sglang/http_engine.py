"""One SGLang server as an :class:`~aprilsched.engines.base.Engine`.

- A generation is sent once. When its stream is left before the last chunk, even by a
  cancellation, the server is told in bounded time to abort it.
- Only a failure to connect is reported as :class:`~aprilsched.errors.EngineUnreachable`: after it
  the call can be repeated, because two copies of the request cannot decode.
- Streams have no timeout; control calls always have one. The size of a stream is bounded by what
  was asked for; what follows the last chunk or an error status is bounded to a few KiB and seconds.

A paused server holds a request before its scheduler knows of it. An abort of such a request is
lost, and SGLang remembers that the request was aborted: it passes no later abort on, and after
continue the request decodes to its end (0.5.21). While nothing has arrived, closing the
connection always works: the server drops a held request and aborts a queued one. That loses no
token, because none was received or on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any

import aiohttp

from aprilsched.engines.base import Chunk, GenerationRequest
from aprilsched.engines.http import (
    Allowance,
    Answer,
    HttpLimits,
    ServerAddress,
    Transport,
    UnfinishedEvents,
    engine_error,
    inflow_of,
    rejection,
)
from aprilsched.engines.sglang.control import ServerControl
from aprilsched.engines.sglang.probe import probe
from aprilsched.engines.sglang.stream import ChunkAssembler, empty_chunk, read_chunks
from aprilsched.engines.sglang.wire import companion_bytes, generate_body
from aprilsched.errors import (
    ConfigError,
    ControlTimeout,
    EngineError,
    EngineRejected,
    EngineUnreachable,
)

_log = logging.getLogger(__name__)

ABORTS_AT_ONCE = 16
"""Number of abort calls that one server gets at a time. Hundreds of them would block the client's
event loop for seconds, and a continue would wait behind them for a connection."""
_ABORT_EACH_S = 0.02
"""Time allowed for each further abort; a real server on its own machine takes 1.5 to 3 ms."""


class HungUp(Exception):
    """Ends the reading of a stream that was closed before anything had arrived from it."""


class Call:
    """One generation in flight."""

    def __init__(self) -> None:
        self.over = False
        """Whether the server has nothing left of the request that an abort could end."""
        self._response: aiohttp.ClientResponse | None = None
        self._broken_off: Exception | None = None

    def attach(self, response: aiohttp.ClientResponse) -> None:
        """Record that the server took the request and streams its answer into `response`."""
        self._response = response
        if self._broken_off is not None:
            raise self._broken_off

    @property
    def silent(self) -> bool:
        """Whether no byte of the answer has arrived, neither read nor unread."""
        return self._response is None or self._response.content.total_bytes == 0

    def break_off(self, reason: Exception) -> None:
        """Close the connection now; the reader of the stream gets `reason` as its error."""
        self._broken_off = reason
        if self._response is not None:
            # The order matters: after close() first, the reader would wait for ever.
            self._response.content.set_exception(reason)
            self._response.close()


class EarlyAborts:
    """Tells one server to abort the generations that were left early, a few at a time.

    Generations that are left together share a time bound, which grows with their number. When
    ``ABORTS_AT_ONCE`` aborts in a row get no answer, the rest is given up. One log line says how
    many were not aborted.

    Args:
        name: name of the server, for the log.
        timeout: seconds for one abort.
        aborts: semaphore that bounds the server's concurrent abort calls.
    """

    def __init__(self, name: str, timeout: float, aborts: asyncio.Semaphore) -> None:
        self._name = name
        self._timeout = timeout
        self._aborts = aborts
        self._waiting = 0
        self._until = 0.0
        self._unanswered = 0
        """Number of aborts in a row that got no answer."""
        self._gone = False
        self._left = 0
        self._not_aborted = 0
        self._why = ""

    async def send(self, abort: Callable[[], Awaitable[None]]) -> None:
        """Make one abort call; its failure is logged and not raised."""
        loop = asyncio.get_running_loop()
        if self._waiting == 0:
            self._until = loop.time() + self._timeout
            self._unanswered = self._left = self._not_aborted = 0
            self._gone, self._why = False, ""
        self._waiting += 1
        self._left += 1
        self._until += _ABORT_EACH_S
        try:
            async with self._aborts:
                if self._unanswered >= ABORTS_AT_ONCE or loop.time() > self._until:
                    self._not_aborted += 1
                elif not self._gone:
                    await self._try(abort)
        finally:
            self._waiting -= 1
            if self._waiting == 0 and self._not_aborted:
                _log.warning(
                    "%d of %d requests that were left early on %s may still decode: %s",
                    self._not_aborted,
                    self._left,
                    self._name,
                    self._why or "the aborts before them took too long",
                )

    async def _try(self, abort: Callable[[], Awaitable[None]]) -> None:
        try:
            await abort()
        except EngineUnreachable as error:
            # The loss of the engine is reported once elsewhere, not for each request.
            self._gone = True
            _log.debug("a request on %s was not aborted: %s", self._name, error)
        except EngineError as error:
            self._not_aborted += 1
            self._why = str(error)
            self._unanswered += isinstance(error, ControlTimeout)
        else:
            self._unanswered = 0


async def despite_cancellation(work: Coroutine[Any, Any, None]) -> None:
    """Run bounded `work` to its end even if this task is cancelled, and then raise that."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if not task.cancelled() and isinstance(task.exception(), KeyboardInterrupt):
        # The event loop has raised it already. Raised here again, it would end the loop that
        # runs the cleanup of everything else.
        raise asyncio.CancelledError
    task.result()
    if cancelled is not None:
        raise cancelled


# --- engine --------------------------------------------------------------------------------------

_DRAIN_SECONDS = 1.0
_DRAIN_BYTES = 2**16


class SGLangEngine(ServerControl):
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
            async with self._send(request) as response:
                call.attach(response)
                await self._check_status(response)
                async with aclosing(self._chunks(request, response)) as chunks:
                    async for chunk in chunks:
                        if chunk.finish is not None:
                            call.over = True
                            await _drain(response)
                        yield chunk
        except HungUp:
            yield empty_chunk(spans_known=self.capabilities.version_spans)
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

    def _send(
        self, request: GenerationRequest
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The response to the one POST that asks for `request`."""
        interval = self._stream_interval if self.facts.stream_interval else None
        body = generate_body(request, stream_interval=interval, priority=self.capabilities.priority)
        return self._transport.stream("generate", body)

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
            limits.max_answer_bytes + companion_bytes(request),
            self._unfinished,
            inflow_of(response),
        )
        assembler = ChunkAssembler(self.name, request, first_version=self._first_version)
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
