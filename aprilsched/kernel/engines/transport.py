"""Two connection pools, bounded control calls, and one layer of retries."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractCookieJar
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential
from yarl import URL

from aprilsched.errors import (
    ConfigError,
    ControlTimeout,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
)
from aprilsched.kernel.engines.failures import Answer, ConnectionDropped, engine_error, rejection
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.kernel.engines.sockets import Connector, generation_socket, inflow_of, probed_socket

_KEEPALIVE_SECONDS = 2.0
"""Below the 5 s after which uvicorn (of SGLang and vLLM) closes an idle connection. A connection
reused at that moment fails after the request was sent, so its arrival would be unknown."""
_CONTROL_CONNECTIONS = 32
_BUFFER_BYTES = 2**16
"""Buffer of one connection; reading pauses at twice this size. There are thousands of them."""
_NOT_DONE = 300
"""The first status that does not mean success."""
_ERROR_BYTES = 2**16
"""Bytes that are read of an error's body; the message uses one sentence of them."""
_ATTEMPTS = 3
_UNWRITABLE = (TypeError, ValueError, OverflowError, RecursionError)
"""The exceptions of encoding JSON; a lone surrogate in a string is a ValueError."""


class Transport:
    """The connections to one server; they belong to one loop from :meth:`open` to :meth:`close`."""

    def __init__(
        self,
        name: str,
        url: URL,
        *,
        admin_key: str | None,
        api_key: str | None,
        limits: HttpLimits,
    ) -> None:
        self._name = name
        self._url = url
        self._limits = limits
        # A server with one key wants it in every call; with two, control calls want the admin key.
        self._control_headers = (
            _headers("api_key", api_key) if admin_key is None else _headers("admin_key", admin_key)
        )
        self._stream_headers = _headers("api_key", api_key)
        self._control: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the two connection pools; nothing is sent."""
        await self.close()
        self._control = self._session(_CONTROL_CONNECTIONS, self._control_headers, probed_socket)
        self._streams = self._session(
            self._limits.max_connections, self._stream_headers, generation_socket
        )

    async def close(self) -> None:
        """Drop all connections."""
        sessions = [self._control, self._streams]
        self._control = self._streams = None
        for session in sessions:
            if session is not None:
                await session.close()

    def stream(
        self, path: str, body: dict[str, Any]
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """POST a request for tokens to `path`, as a context manager over the open response.

        It goes over the pool of generations, with the API key.

        Raises:
            EngineRejected: if the body cannot be written as JSON; another attempt cannot help.
        """
        try:
            data = msgspec.json.encode(body)
        except _UNWRITABLE as error:
            what = f"the request cannot be written as JSON ({error}); give plain data."
            raise EngineRejected(self._name, what, status=400) from error
        return self._require_open(self._streams).post(
            self._url / path,
            data=data,
            allow_redirects=False,
        )

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        timeout: float,  # noqa: ASYNC109 - the bound covers the retries as well
        accept: tuple[int, ...] = (200,),
        repeatable: bool = True,
        admin: bool = True,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
        at_most: int | None = None,
    ) -> Answer:
        """Make one control call, retried where that is safe.

        `at_most` bounds the bytes of the answer below ``max_answer_bytes``.

        Raises:
            EngineRejected: if the status is not one of `accept`.
            ControlTimeout: if the call, with its retries, takes longer than `timeout` seconds.
        """
        session = self._require_open(self._control if admin else self._streams)
        retries = AsyncRetrying(
            retry=retry_if_exception(lambda error: _may_repeat(error, repeatable)),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.1, max=1.0),
            reraise=True,
        )
        try:
            async with asyncio.timeout(timeout):
                answer: Answer = await retries(
                    self._once, session, method, path, body, headers, query, at_most
                )
        except TimeoutError as error:
            raise ControlTimeout(
                self._name, f"{method} /{path} did not answer within {timeout:g} s."
            ) from error
        if answer.status not in accept:
            raise rejection(self._name, f"{method} /{path}", answer)
        return answer

    async def _once(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: object,
        headers: Mapping[str, str] | None,
        query: Mapping[str, str] | None,
        at_most: int | None,
    ) -> Answer:
        data = None if body is None else msgspec.json.encode(body)
        if session.closed:  # It was closed while a retry waited; aiohttp raises no error of ours.
            raise EngineError(self._name, "was closed during a call.")
        try:
            async with session.request(
                method,
                self._url / path,
                params=query,
                data=data,
                headers=headers,
                allow_redirects=False,
            ) as response:
                return Answer(response.status, await self.read(response, at_most))
        except (aiohttp.ClientError, OSError) as error:
            raise engine_error(self._name, self._url, error) from error

    async def read(self, response: aiohttp.ClientResponse, at_most: int | None = None) -> bytes:
        """Read the whole body, up to the limit; for an error, only the start of the body."""
        failed = response.status >= _NOT_DONE
        limit = self._limits.max_answer_bytes
        hint = "raise max_answer_bytes if it should"
        if at_most is not None and at_most < limit:
            limit, hint = at_most, "no such answer is that long"
        if failed:
            limit = _ERROR_BYTES
        inflow = inflow_of(response)
        body = bytearray()
        async for data in response.content.iter_any():
            inflow.renew()
            body += data
            if len(body) > limit:
                response.close()
                if failed:
                    break
                raise EngineProtocolError(
                    self._name,
                    f"{response.url.path} answered with more than {limit} bytes; {hint}.",
                )
        return bytes(body[:limit])

    def _require_open(self, session: aiohttp.ClientSession | None) -> aiohttp.ClientSession:
        if session is None:
            raise EngineError(self._name, "is not open; call open() before using it.")
        return session

    def _session(
        self, connections: int, headers: dict[str, str], make: Callable[[Any], socket.socket]
    ) -> aiohttp.ClientSession:
        jar: AbstractCookieJar = aiohttp.DummyCookieJar()
        connector = Connector(
            limit=connections, keepalive_timeout=_KEEPALIVE_SECONDS, socket_factory=make
        )
        return aiohttp.ClientSession(
            connector=connector,
            # No total timeout and no read timeout: a straggler or a paused stream may be silent.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_timeout),
            trust_env=False,
            cookie_jar=jar,
            headers=headers,
            auto_decompress=False,
            read_bufsize=_BUFFER_BYTES,
        )


def _headers(what: str, key: str | None) -> dict[str, str]:
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{what} is empty or holds characters that no HTTP header can carry.")
    # identity: the size of a decompressed answer could not be bounded. A server that compresses
    # all the same is not decompressed.
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    return headers if key is None else {**headers, "Authorization": f"Bearer {key}"}


def _may_repeat(error: BaseException, repeatable: bool) -> bool:
    return isinstance(error, EngineUnreachable) or (
        repeatable and isinstance(error, ConnectionDropped)
    )
