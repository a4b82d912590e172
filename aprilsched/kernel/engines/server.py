"""One inference server over HTTP as an :class:`~aprilsched.kernel.engines.base.Engine`, whatever
program it is: its properties, version and released memory, and generations that always end.

- A generation is sent once. When its stream is left before the last chunk, even by a
  cancellation, an abort is sent to the server in bounded time.
- Only a failure to connect is reported as :class:`~aprilsched.errors.EngineUnreachable`: after it
  the call can be repeated, because two copies of the request cannot decode.
- Streams have no timeout; control calls always have one. The size of a stream is bounded by
  the request; data after the last chunk or an error status is limited to a few KiB and seconds.
- The weights count as *inconsistent* from the first byte of an update until it has succeeded.
- The client records which memory was released, because servers do not check the order of such
  calls. A call counts as executed unless the server refused it or could not be reached.

A paused server may hold a request before its scheduler knows of it. SGLang loses an abort of such a
request and remembers that it was aborted: it passes no later abort on, and after continue the
request decodes to its end (0.5.21). While nothing has arrived, closing the connection always works:
the server drops a held request and aborts a queued one. No token is lost, because none was received
or on its way.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any, Literal, TypeAlias, TypeVar, cast

import aiohttp

from aprilsched.errors import EngineError, EngineRejected, EngineUnreachable
from aprilsched.kernel.engines.address import ServerAddress
from aprilsched.kernel.engines.base import Chunk, Engine, GenerationRequest
from aprilsched.kernel.engines.control import Control, Facts
from aprilsched.kernel.engines.failures import Answer, engine_error, rejection, retry_after_s
from aprilsched.kernel.engines.generations import (
    ABORTS_AT_ONCE,
    Call,
    EarlyAborts,
    HungUp,
    despite_cancellation,
)
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.sockets import inflow_of
from aprilsched.kernel.engines.sse import Allowance, UnfinishedEvents
from aprilsched.kernel.engines.stream import ResponseReader, empty_chunk, read_chunks
from aprilsched.kernel.engines.transport import Transport
from aprilsched.kernel.values.companions import MOST_KEPT, TOP

FactsT = TypeVar("FactsT", bound=Facts)


_log = logging.getLogger(__name__)

T = TypeVar("T")


def release(version: str) -> tuple[int, int, int]:
    """The release in a version string: "0.5.18.dev3" is 0.5.18, and no release is (0, 0, 0)."""
    match = re.match(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", version)
    if match is None:
        return (0, 0, 0)
    major, minor, patch = match.groups("0")
    return (int(major), int(minor), int(patch))


Over: TypeAlias = Literal["sum", "mean"]

_LINE = re.compile(rb"^(\w+):(\w+)(?:\{[^\n]*\})? ([^ \n]{1,32})(?: \d+)?$", re.MULTILINE)


def read_series(page: bytes, wanted: Mapping[str, Over], *, program: str) -> dict[str, float]:
    """Return the `wanted` series of a page of metrics, without missing or non-finite ones.

    They are named ``PROGRAM:NAME``; `wanted` gives the reduction of several ranks' values to one.
    """
    found: dict[str, list[float]] = {}
    for match in _LINE.finditer(page):
        name = match[2].decode()
        if match[1] != program.encode() or name not in wanted:
            continue
        with suppress(ValueError):
            if math.isfinite(value := float(match[3])):
                found.setdefault(name, []).append(value)
    return {
        name: math.fsum(values) / (1 if wanted[name] == "sum" else len(values))
        for name, values in found.items()
    }


_DRAIN_SECONDS = 1.0
_DRAIN_BYTES = 2**16


class HttpEngine(Control[FactsT]):
    """One server at an address.

    A subclass implements its program's calls: `_probe`, `_post`, `_reader` and `_abort`, in
    addition to those that :class:`Control` needs. If its streams are not server-sent events, it
    also has `_chunks`.

    Args:
        url: URL where the server listens, as ``http://host:port``.
        admin_key: key for control calls, if it differs from `api_key`.
        api_key: key for generation.
        stream_interval: tokens between two events of a stream.
        limits: timeouts and sizes.
        first_version: version of the weights that the server labels "0"; with it, the labels are
            the trainer's own, and a resumed run takes decimal numbers for its versions.

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
        first_version: int | None = None,
    ) -> None:
        address = ServerAddress.parse(url)
        self._url = address.url
        self._calls: dict[str, Call] = {}
        limits = limits or HttpLimits()
        self._transport = Transport(
            address.name, self._url, admin_key=admin_key, api_key=api_key, limits=limits
        )
        self._unfinished = UnfinishedEvents(address.name, limits.max_unfinished_bytes)
        super().__init__(
            address.name,
            self._transport,
            limits,
            stream_interval=stream_interval,
            first_version=first_version,
        )
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
        return f"{type(self).__name__}({str(self._url)!r})"

    async def open(self) -> None:
        """Connect and probe; close the connections again if the server cannot be used."""
        await self._transport.open()
        self._bind_to_loop()
        try:
            self._facts = await self._probe()
        except BaseException:
            await self._transport.close()
            raise

    async def close(self) -> None:
        """Release the connections; the streams that are open end with an error."""
        for call in self._calls.values():
            call.break_off(EngineError(self.name, "was closed while it generated."))
        await self._transport.close()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """Stream one response; see :meth:`aprilsched.kernel.engines.base.Engine.generate`."""
        self._check_request(request)
        call = self._calls[request.request_id] = Call()
        try:
            async with aclosing(self._answer(request, call)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except HungUp:
            yield empty_chunk(spans_known=self.capabilities.version_spans)
        except (EngineRejected, EngineUnreachable):
            # The server does not have the request. An abort could end another one of this id.
            call.over = not call.unsure
            raise
        except (aiohttp.ClientError, OSError) as error:
            failure = engine_error(self.name, self._url, error)
            call.over = isinstance(failure, EngineUnreachable)
            if not (call.aborted and await self._still_runs()):
                raise failure from error
            yield empty_chunk(spans_known=False)
        finally:
            if self._calls.get(request.request_id) is call:
                del self._calls[request.request_id]
            if not call.over:
                await despite_cancellation(self._abort_quietly(request.request_id))

    async def _answer(self, request: GenerationRequest, call: Call) -> AsyncGenerator[Chunk, None]:
        """The chunks of one response, and the errors of whatever brings them."""
        async with self._send(request) as response:
            call.attach(response)
            await self._check_status(response)
            async with aclosing(self._chunks(request, response)) as chunks:
                async for chunk in chunks:
                    if chunk.finish is not None:
                        call.over = True
                        await drain(response)
                    yield chunk

    async def _abort_quietly(self, request_id: str) -> None:
        """Abort a generation that no client reads any longer."""
        await self._early_aborts.send(lambda: self._last_abort(request_id))

    async def _last_abort(self, request_id: str) -> None:
        await self._abort(request_id, self._limits.abort_timeout)

    async def abort(self, request_id: str) -> None:
        """End one request; if nothing has arrived from it, its connection is closed as well.

        A connection that it shares is closed only if an abort before this one did not end it.
        """
        call = self._calls.get(request_id)
        if call is not None:
            if call.silent and (call.aborted or not call.shared):
                call.break_off(HungUp())
            call.aborted = True
        async with self._aborts:
            await self._abort(request_id, self._limits.control_timeout)

    async def _still_runs(self) -> bool:
        """Whether the process that was opened answers.

        After an abort a connection may break before its last event (seen once with SGLang 0.5.21).
        If the server still runs, this is not a failure: the tokens that have arrived are the
        response. A server that was lost or restarted in that time has failed.
        """
        try:
            await self._check_process()
        except EngineError:
            return False
        return True

    async def _probe(self) -> FactsT:
        """Probe the server, and refuse one that cannot be used."""
        raise NotImplementedError

    def _post(self, request: GenerationRequest) -> tuple[str, dict[str, Any]]:
        """The path and the body of the call that asks for `request`."""
        raise NotImplementedError

    def _reader(self, request: GenerationRequest) -> ResponseReader:
        """Return the reader that turns the events of the answer to `request` into chunks."""
        raise NotImplementedError

    async def _abort(self, request_id: str, timeout: float) -> None:  # noqa: ASYNC109
        """Tell the server to abort a request; unknown ids are ignored."""
        raise NotImplementedError

    def _send(
        self, request: GenerationRequest
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """The response to the one POST that asks for `request`."""
        return self._transport.stream(*self._post(request))

    async def _check_status(self, response: aiohttp.ClientResponse) -> None:
        if response.status == 200:
            return
        body = b""
        # The status alone is enough for the error if the body does not end in time.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.control_timeout):
                body = await self._transport.read(response)
        wait = retry_after_s(response.headers.get("Retry-After"))
        answer = Answer(response.status, body, wait)
        raise rejection(self.name, f"POST {response.url.path}", answer)

    def _chunks(
        self, request: GenerationRequest, response: aiohttp.ClientResponse
    ) -> AsyncGenerator[Chunk, None]:
        allowance = Allowance(
            self.name,
            request.request_id,
            self._limits.max_answer_bytes + companion_bytes(request),
            self._unfinished,
            inflow_of(response),
        )
        return read_chunks(response.content.readany, allowance, self._reader(request))


def facts_of(engine: Engine) -> Facts | None:
    """Return the properties that a server reported when opened, or None if it is not a server."""
    return cast("HttpEngine[Facts]", engine).facts if isinstance(engine, HttpEngine) else None


_KEPT_BYTES = 64 << 20
"""Largest size on the wire of what a request keeps: a little of it may be wanted of much."""
_ID_BYTES = 12
"""Largest size of a token id in a list of JSON."""
_LIKELY_BYTES = 80
"""Largest size of a token with its log-probability in one, with the names of vLLM's fields."""


def companion_bytes(request: GenerationRequest) -> int:
    """The largest size of the companions in an answer (base64 of int32, or lists of ids or of
    log-probabilities), and of what else is kept of it."""
    context = len(request.input_ids) + request.sampling.max_new_tokens
    return bool(request.sampling.keep) * _KEPT_BYTES + sum(
        request.sampling.max_new_tokens * MOST_KEPT * _ID_BYTES
        if companion.ragged
        else request.sampling.max_new_tokens * (companion.shape[0] + 1) * _LIKELY_BYTES
        if companion.name == TOP
        else context * math.prod(companion.shape) * 6
        for companion, _ in request.companions
    )


async def drain(response: aiohttp.ClientResponse) -> None:
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
