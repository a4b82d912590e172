"""HTTP to one server, whatever its program: address, limits, sockets, errors, event streams, calls.

- Control calls have their own pool, so that an abort never waits behind generations.
- A control call is repeated after a failure to connect and, where repeating it is harmless, after
  a dropped connection. A generation is never repeated here.
- Answers are not decompressed, redirects are not followed, cookies are not kept, and proxies of
  the environment are not used.
- A process without file descriptors waits for some: that is no failure of its servers.
- Keys exist only in the headers of the two sessions: not in a repr, a log line or an error.
- The duration of a generation has no limit: the scheduler exists for stragglers, and a paused
  stream is silent for as long as the pause lasts.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import re
import resource
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, fields
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import aiohttp
import msgspec
from aiohttp.abc import AbstractCookieJar
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_random_exponential
from yarl import URL

from aprilsched.errors import (
    ConfigError,
    ControlTimeout,
    EngineBusy,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """Bounds for one server; times are in seconds.

    Args:
        connect_timeout: time to open one connection.
        control_timeout: time for a pause, continue, abort or probe, retries included.
        flush_timeout: time until a flush that the server refuses as "busy" must have succeeded.
        update_timeout: time to load one version of the weights.
        abort_timeout: time for the abort of a generation that was left early.
        max_connections: number of generations in flight on one server; 0 for any number. With a
            bound each has a connection of its own.
        max_answer_bytes: bytes of one whole control answer, and bytes of a streamed answer beyond
            what its tokens account for (an event that does not end, empty events, comments).
        max_unfinished_bytes: bytes of incomplete events in all streams of the server.
    """

    connect_timeout: float = 10.0
    control_timeout: float = 30.0
    flush_timeout: float = 60.0
    update_timeout: float = 900.0
    abort_timeout: float = 2.0
    max_connections: int = 0
    max_answer_bytes: int = 64 * 2**20
    max_unfinished_bytes: int = 2**30

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "max_connections":
                if value < 0:
                    raise ConfigError(f"max_connections is {value}; give 0 (any number) or more.")
            elif not value > 0:
                raise ConfigError(f"{field.name} is {value}; give a number above 0.")


# --- address -------------------------------------------------------------------------------------

# The address of a server, and the name that segments, events and errors use for it.


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAddress:
    """A server's base URL; two spellings of one address are equal."""

    url: URL

    @classmethod
    def parse(cls, text: str) -> ServerAddress:
        """Parse the address in `text`.

        Raises:
            ConfigError: if it is not an http(s) URL of a host without user, query or fragment.
        """
        try:
            url = URL(text.strip())
            usable = url.scheme in ("http", "https") and bool(url.host) and url.port is not None
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(
                f"{text!r} is not a URL; give one like http://10.0.0.1:30000."
            ) from None
        if url.user is not None or url.password is not None:
            # The message does not repeat the URL, because it may hold a password.
            raise ConfigError("A server's URL holds a user or password; use api_key instead.")
        if not usable or url.query_string or url.fragment:
            raise ConfigError(
                f"{text!r} is not a server's URL; give one like http://10.0.0.1:30000."
            )
        return cls(url=url.with_path(url.path.rstrip("/") or "/"))

    @property
    def name(self) -> str:
        """``host:port``, followed by the path where several servers share a host and port."""
        host = f"[{self.url.host}]" if ":" in (self.url.host or "") else self.url.host
        return f"{host}:{self.url.port}{self.url.path.rstrip('/')}"


# --- sockets -------------------------------------------------------------------------------------

# Sockets that notice a dead peer, and a server that sends endless data outside of the body.
#
# An HTTP library skips any number of interim answers, chunk extensions and zeros before a chunk's
# length, and reports none of them. A bound on the body that was read would miss them; a counter in
# the socket does not.

ENDLESS = "it sends endless data outside of the body"
_PASSED_OVER = 4 * 2**20
"""Number of bytes: several times a connection's buffer and the longest headers together."""
_TCP_PROBES = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class Inflow:
    """Counts the bytes that a connection receives between two reads of an answer's body."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _PASSED_OVER

    def renew(self) -> None:
        """Start again: a piece of the body was read."""
        self._left = _PASSED_OVER

    def count(self, received: int) -> None:
        """Count received bytes; raise OSError, which breaks the connection, at too many."""
        self._left -= received
        if self._left < 0:
            raise OSError(errno.EMSGSIZE, ENDLESS)


class _Socket(socket.socket):
    """A socket that counts what it receives, by either of the two methods that asyncio uses."""

    def __init__(self, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        self.inflow = Inflow()

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        data = super().recv(bufsize, flags)
        self.inflow.count(len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        size = super().recv_into(buffer, nbytes, flags)
        self.inflow.count(size)
        return size


_made: WeakValueDictionary[int, _Socket] = WeakValueDictionary()
"""The open sockets by file descriptor, which is unique among open sockets."""


def probed_socket(address: Any) -> socket.socket:
    """Make a socket with TCP keep-alive.

    A machine that loses power does not close its connections. Without these probes its streams
    would stay open for ever, because a silent stream may be a paused one.
    """
    family, kind, protocol, _, _ = address
    made = _Socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_PROBES:
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    _made[made.fileno()] = made
    return made


_RESERVED_DESCRIPTORS = 16
"""File descriptors that generations leave to control calls, the log and the store."""
_DESCRIPTORS_RETRY_S = 1.0
_WARNING_INTERVAL_S = 60.0


def _generation_socket(address: Any) -> socket.socket:
    """Make a :func:`probed_socket`, unless it would be one of the last.

    Raises:
        OSError: EMFILE, if the process has few file descriptors left.
    """
    made = probed_socket(address)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A new descriptor has the lowest free number, so all below it are in use.
    if limit != resource.RLIM_INFINITY and made.fileno() >= limit - _RESERVED_DESCRIPTORS:
        made.close()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return made


class _Connector(aiohttp.TCPConnector):
    """A pool whose calls wait while the process has no file descriptors for a connection."""

    _warned = -math.inf
    """When any pool has warned last; they share the descriptors."""

    async def connect(self, *args: Any, **options: Any) -> Any:
        while True:
            try:
                return await super().connect(*args, **options)
            except aiohttp.ClientConnectorError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
            now = asyncio.get_running_loop().time()
            if abs(now - _Connector._warned) >= _WARNING_INTERVAL_S:
                _Connector._warned = now
                _log.warning("requests wait for free file descriptors; raise `ulimit -n`")
            await asyncio.sleep(_DESCRIPTORS_RETRY_S)


def inflow_of(response: aiohttp.ClientResponse) -> Inflow:
    """The counter of the connection of `response`; a new one if `response` is complete already."""
    connection = response.connection
    transport = None if connection is None else connection.transport
    found = None if transport is None else transport.get_extra_info("socket")
    made = None if found is None else _made.get(found.fileno())
    return Inflow() if made is None else made.inflow


# --- failures ------------------------------------------------------------------------------------

# Translates failed or refused HTTP calls into this package's own errors.

_MESSAGE_LIMIT = 300
"""Number of characters of a server's own message that an error keeps."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of decoding JSON; RecursionError comes from thousands of nested brackets."""

_DECIMAL = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)
_RETRY_AFTER_LENGTH = 64
"""Number of characters of a Retry-After header; a date has 29."""

_MESSAGE_BYTES = 2**14
"""Number of bytes of an error's body that are searched for its message."""


class ConnectionDropped(EngineError):
    """The connection broke after the request was sent, so the request may have been executed."""


class Answer(NamedTuple):
    """The status and body of a call, and what it says of a later one."""

    status: int
    body: bytes
    retry_after_s: float | None = None


def engine_error(name: str, url: URL, error: Exception) -> EngineError:
    """The error of this package that stands for a failure of aiohttp."""
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            why = error.strerror or "timed out"
            return EngineUnreachable(name, f"cannot connect ({why}); is the server up at {url}?")
        case aiohttp.ClientResponseError():
            _forget_keys(error)
            return EngineProtocolError(
                name, f"does not speak HTTP ({quote(error.message)}); is {url} right?"
            )
        case _ if ENDLESS in str(error):
            return EngineProtocolError(name, f"was disconnected because {ENDLESS}; is {url} right?")
        case _:
            return ConnectionDropped(
                name, f"the connection broke ({type(error).__name__}: {quote(str(error))})."
            )


def _forget_keys(error: aiohttp.ClientResponseError) -> None:
    """Remove the request's headers from aiohttp's error, which is shown as the cause of ours."""
    nothing: Any = error.request_info.headers.copy()
    nothing.clear()
    error.request_info = error.request_info._replace(headers=nothing)
    error.args = (error.request_info, error.history)


def rejection(name: str, what: str, answer: Answer) -> EngineRejected:
    """The error of this package for an HTTP error status, with the server's own message."""
    message = quote(_message(answer.body))
    hint = ""
    if answer.status in (401, 403):
        hint = (
            "; give the server's --admin-api-key as admin_key, or its --api-key as api_key (to a "
            "command as --admin-key-env and --api-key-env, to the gateway's as "
            "--engine-admin-key-env and --engine-api-key-env)"
        )
    return refusal(
        name,
        f"{what} answered {answer.status} ({message or 'no message'}){hint}.",
        status=answer.status,
        retry_after_s=answer.retry_after_s,
    )


BUSY_STATUSES = frozenset({408, 429, 503})
"""Statuses of a server, or of a router before it, that has no room for a request now. SGLang sends
503 to a full queue, to a request that waited too long in it and to one that it preempted (0.5.23),
vLLM 503 to a full queue and while it scales (0.32), and SGLang's router 429 and 408 (0.3.2)."""


def refusal(
    name: str, message: str, *, status: int, retry_after_s: float | None = None
) -> EngineRejected:
    """The error of this package for an error status of an answer or of an event."""
    if status in BUSY_STATUSES:
        return EngineBusy(name, message, status=status, retry_after_s=retry_after_s)
    return EngineRejected(name, message, status=status)


def retry_after_s(header: str | None) -> float | None:
    """The seconds in a Retry-After header: a number or a date. None if it has neither."""
    if header is None or len(header) > _RETRY_AFTER_LENGTH:
        return None
    with suppress(ValueError, OverflowError):
        if _DECIMAL.fullmatch(header.strip()):
            return float(header)
        when = parsedate_to_datetime(header)
        return max(0.0, when.timestamp() - time.time())
    return None


def _message(body: bytes) -> str:
    try:
        found: Any = msgspec.json.decode(body[:_MESSAGE_BYTES])
        for name in ("error", "message", "detail"):
            if isinstance(found, dict):
                found = cast("dict[str, Any]", found).get(name, found)
        return str(found)
    except UNREADABLE:
        return body[:_MESSAGE_BYTES].decode("utf-8", "replace")


def quote(text: str) -> str:
    """The server's words in a form that an error can hold: one line, printable, not too long."""
    words = " ".join(text[: 4 * _MESSAGE_LIMIT].split())
    return "".join(c if c.isprintable() else "?" for c in words[:_MESSAGE_LIMIT])


# --- sse -----------------------------------------------------------------------------------------

# Parses streamed answers (server-sent events), and bounds their bytes.
#
# - The bytes of an answer are set off against its tokens. What exceeds the tokens is bounded over
#   the whole answer, whatever it is: an event that does not end, comments, blank lines, events
#   without a token, oversized events.
# - The bytes of incomplete events are bounded over all streams of a server: thousands of streams,
#   each within its own bound, could fill the memory together.

_EVENT_BYTES = 4096
"""Bytes of an event without its tokens: about twenty fields, a few hundred bytes (0.5.21)."""
_TOKEN_BYTES = 256
"""Bytes for each token in an event: id and triple take 40, the text takes a few more, and an abort
repeats the whole response."""


class UnfinishedEvents:
    """Counts the bytes of incomplete events that all streams of one server hold."""

    def __init__(self, engine: str, max_bytes: int) -> None:
        self._engine = engine
        self._max_bytes = max_bytes
        self.size = 0

    def change(self, by: int) -> None:
        """Add what one stream holds more than before; a negative number when it holds less.

        Raises:
            EngineProtocolError: in the stream that asks, if all streams together hold too much.
        """
        self.size += by
        if by > 0 and self.size > self._max_bytes:
            raise EngineProtocolError(
                self._engine,
                f"its streams sent more than {self._max_bytes} bytes of events that are not whole "
                "yet; raise max_unfinished_bytes, or let the server send shorter events.",
            )


class Allowance:
    """Bounds the bytes of one streamed answer.

    Args:
        engine, request_id: names for the error messages.
        max_bytes: number of bytes that may arrive beyond what the tokens account for.
        unfinished: the counter that this stream shares with the server's other streams.
        inflow: the counter of the connection, which also counts bytes outside of the body.
    """

    def __init__(
        self,
        engine: str,
        request_id: str,
        max_bytes: int,
        unfinished: UnfinishedEvents | None = None,
        inflow: Inflow | None = None,
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        self._max_bytes = max_bytes
        self._unfinished = unfinished
        self._inflow = inflow or Inflow()
        self._excess = 0
        self._held = 0

    def take(self, received: int) -> None:
        """Count bytes that have arrived.

        Raises:
            EngineProtocolError: if they are too many for the tokens that came with them.
        """
        self._inflow.renew()
        self._excess += received
        if self._excess > self._max_bytes:
            raise EngineProtocolError(
                self._engine,
                f"request {self._request_id}: sent more than {self._max_bytes} bytes beyond what "
                "its tokens account for; raise max_answer_bytes, or let the server send each token "
                "once.",
            )

    def pay(self, event: int, tokens: int) -> None:
        """Set an event of `event` bytes off; the answer has `tokens` tokens in all by now."""
        self._excess -= min(event, _EVENT_BYTES + _TOKEN_BYTES * tokens)

    def hold(self, size: int) -> None:
        """Record that the stream holds `size` bytes of an incomplete event.

        Raises:
            EngineProtocolError: if all streams of the server hold too much.
        """
        by, self._held = size - self._held, size
        if by and self._unfinished is not None:
            self._unfinished.change(by)

    def close(self) -> None:
        """End the answer: the stream holds nothing any more."""
        self.hold(0)


class EventSplitter:
    """Splits a byte stream into the payloads of its ``data:`` lines, within its allowance.

    aiohttp's own ``readline`` fails at 128 KiB, and one cumulative event can have megabytes.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the payloads that `data` completes.

        Raises:
            EngineProtocolError: if too much has arrived.
        """
        self._allowance.take(len(data))
        lines = data.split(b"\n")
        rest = lines.pop()
        held = self._size
        if lines and self._pieces:
            lines[0] = b"".join((*self._pieces, lines[0]))
            self._pieces, self._size = [], 0
        # The pieces of an unfinished line are joined once: joining them at each call would cost
        # the square of the line's length.
        if rest:
            self._pieces.append(rest)
            self._size += len(rest)
        if self._size != held:
            self._allowance.hold(self._size)
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


# --- transport -----------------------------------------------------------------------------------

# Two connection pools, bounded control calls, and one layer of retries.

_KEEPALIVE_SECONDS = 2.0
"""It is below the 5 s after which uvicorn (of SGLang and vLLM) closes an idle connection. One that
is reused at that moment fails after the request was sent, and nobody knows whether it arrived."""
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
            self._limits.max_connections, self._stream_headers, _generation_socket
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
        """Read the whole body, up to the limit; of an error's body only the beginning."""
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
        connector = _Connector(
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
