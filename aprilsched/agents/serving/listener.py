"""Listens at one address with an aiohttp application.

Connections are accepted here rather than by asyncio, whose accept loop logs a traceback for each
of `backlog` tries when no file descriptors are left: 10,000 a second (CPython 3.11).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import socket
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_address
from typing import Any, cast

from aiohttp import web

from aprilsched.agents.serving.refusals import Crashed, as_json
from aprilsched.errors import ConfigError
from aprilsched.kernel.values.bounds import PORT, check_range

log = logging.getLogger("aprilsched")

_BACKLOG = 4096
"""Connections that may wait to be accepted: Linux's default limit. With asyncio's 100, a burst of
1,000 clients waited for their second and third try."""
_CLOSE_S = 1.0
"""Seconds that open connections get when the listener closes."""
_IDLE_S = 120.0
"""Seconds after which a connection without a complete request head is closed. It is longer than
clients keep idle connections (httpx 5 s, aiohttp 15 s, Go 90 s), so few send into a closed one."""
_SPARED_S = 0.5
"""Seconds for which an idle connection is spared if others wait for its slot."""
_RETRY_S = 1.0
"""Seconds before accepting is retried when no file descriptors are left."""
_WARNING_INTERVAL_S = 60.0
_MOST_DESCRIPTORS = 2**20
"""The limit of file descriptors if the system sets none."""
_SPARE_DESCRIPTORS = 16
"""File descriptors that are reserved for the log, the store and control calls."""


class _Connection(web.RequestHandler):
    """One connection. Its client's bytes appear in no log line and no error, because they may
    contain a key.

    Attributes:
        idle_since: time of the connect, or of the latest answer.
    """

    __slots__ = ("_acceptor", "idle_since")

    def __init__(self, acceptor: _Acceptor, server: web.Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._acceptor = acceptor
        self.idle_since = self._loop.time()

    @property
    def idle(self) -> bool:
        """Whether it has no open request, and its last answer is sent."""
        if self._request_in_progress or self.transport is None:
            return False
        return not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._acceptor.connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._acceptor.left(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer, then close the connection if others wait for its slot."""
        if self._acceptor.full:
            resp.force_close()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.idle_since = self._loop.time()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are not HTTP, and errors that no handler has caught."""
        if status >= Crashed.status:
            super().handle_error(request, status, exc, message)
            answer = as_json({"error": {"message": "Internal server error."}}, status)
        else:
            # Both aiohttp's error and its message quote the bytes.
            kind = type(exc).__name__
            log.warning("a request is not valid HTTP peer=%s error=%s", request.remote, kind)
            message = f"The request is not valid HTTP ({kind}); check its first line and headers."
            answer = as_json({"error": {"message": message}}, status)
        answer.force_close()
        return answer


class _Acceptor:
    """Accepts the connections of listening sockets, up to a limit.

    At the limit, an idle connection is closed for a new one. If none is idle, new ones wait in the
    sockets' backlog.

    Args:
        server: makes the connections' handlers.
        sockets: the listening sockets, which are closed with it.
        most: maximum number of connections.
        options: options of aiohttp's connection handler.

    Attributes:
        connections: the open connections.
    """

    def __init__(
        self, server: web.Server, sockets: Sequence[socket.socket], most: int, **options: Any
    ) -> None:
        self.connections: set[_Connection] = set()
        self.sockets = sockets
        self._most = most
        self._make = partial(_Connection, self, server, **options)
        self._loop = asyncio.get_running_loop()
        self._making: set[asyncio.Task[Any]] = set()
        """Accepted connections whose handler does not exist yet."""
        self._retry: asyncio.TimerHandle | None = None
        """Timer that resumes accepting; None while connections are accepted."""
        self._warned, self._pauses = -math.inf, 0
        self._accept_more()

    @property
    def full(self) -> bool:
        """Whether the limit of connections is reached."""
        return len(self.connections) + len(self._making) >= self._most

    def left(self, connection: _Connection) -> None:
        """Note that a connection has ended."""
        self.connections.discard(connection)
        self._resume()

    async def close(self) -> None:
        """Accept no more connections, and wait for the handlers of the accepted ones.

        A handler that is made later would stay open forever, because nothing would track it.
        """
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        for each in self.sockets:
            self._loop.remove_reader(each)
            each.close()
        await asyncio.gather(*self._making, return_exceptions=True)

    def _resume(self) -> None:
        if self._retry is not None and not self.full:
            self._retry.cancel()
            self._accept_more()

    def _accept_more(self) -> None:
        self._retry = None
        for each in self.sockets:
            self._loop.add_reader(each, self._accept, each)

    def _accept(self, listening: socket.socket) -> None:
        if self.full:
            self._pause(_SPARED_S, f"{self._most} are open")
            return
        try:
            accepted, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause(_RETRY_S, os.strerror(error.errno or 0))
            return
        accepted.setblocking(False)
        making = self._loop.create_task(self._loop.connect_accepted_socket(self._make, accepted))
        self._making.add(making)
        making.add_done_callback(partial(self._made, accepted))

    def _made(self, accepted: socket.socket, making: asyncio.Task[Any]) -> None:
        self._making.discard(making)
        if making.cancelled() or making.exception() is not None:
            accepted.close()
        self._resume()

    def _pause(self, seconds: float, why: str) -> None:
        """Stop accepting for `seconds` or until a connection ends; close the longest idle one."""
        for each in self.sockets:
            self._loop.remove_reader(each)
        self._retry = self._loop.call_later(seconds, self._accept_more)
        now, self._pauses = self._loop.time(), self._pauses + 1
        idle = [each for each in self.connections if each.idle]
        oldest = min(idle, key=lambda each: each.idle_since, default=None)
        if oldest is not None and oldest.idle_since + _SPARED_S <= now:
            oldest.force_close()
        if self._warned + _WARNING_INTERVAL_S <= now:
            log.warning(
                "new connections wait and idle ones are closed (%s); raise `ulimit -n` pauses=%d",
                why,
                self._pauses,
            )
            self._warned, self._pauses = now, 0


class Listener:
    """An address, and the server that listens there while it is open.

    Args:
        host: address to listen at; any address but loopback lets other machines connect.
        port: port to listen at; 0 for any free one.
        descriptors: file descriptors per client, including its connection.

    Raises:
        ConfigError: if the port is out of its range.
    """

    def __init__(self, host: str, port: int, *, descriptors: int = 2) -> None:
        check_range(PORT, port=port)
        self._host = host
        self._port = port
        self._descriptors = descriptors
        self._bound: int | None = None
        self._open: tuple[web.AppRunner, _Acceptor] | None = None

    @property
    def url(self) -> str:
        """The URL of the server; with port 0, its port is known after the first open."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port if self._bound is None else self._bound}"

    @property
    def listening(self) -> bool:
        return self._open is not None

    @property
    def reachable(self) -> bool:
        """Whether other machines may reach its address."""
        sockets = () if self._open is None else self._open[1].sockets
        return not all(ip_address(each.getsockname()[0]).is_loopback for each in sockets)

    @property
    def connections(self) -> list[web.RequestHandler]:
        """The open connections."""
        return [] if self._open is None else list(self._open[1].connections)

    async def open(self, app: web.Application) -> None:
        """Start to listen. A handler is cancelled if its client disconnects.

        Raises:
            ConfigError: if the address cannot be used.
        """
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CLOSE_S)
        port = self._port if self._bound is None else self._bound
        try:
            await runner.setup()
            sockets = await self._bind(port)
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"Cannot listen on {self._host}:{port} ({os.strerror(error.errno or 0)}); give "
                "another host or port."
            ) from error
        except BaseException:
            await runner.cleanup()
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit
        acceptor = _Acceptor(
            cast(web.Server, runner.server),
            sockets,
            max(1, limit // self._descriptors - _SPARE_DESCRIPTORS),
            access_log=None,
            keepalive_timeout=_IDLE_S,
            # Bodies are decompressed by their reader, which has limits.
            auto_decompress=False,
        )
        self._open = runner, acceptor
        self._bound = sockets[0].getsockname()[1]

    async def _bind(self, port: int) -> list[socket.socket]:
        """Return the listening sockets of the address, which asyncio resolves and binds."""
        loop = asyncio.get_running_loop()
        found = await loop.create_server(asyncio.Protocol, self._host, port, start_serving=False)
        sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in found.sockets]
        found.close()
        for each in sockets:
            each.setblocking(False)
            each.listen(_BACKLOG)
        return sockets

    async def close(self, *, keep_port: bool = False) -> None:
        """Stop listening, and close open connections after a second.

        With `keep_port` the next :meth:`open` listens at the same port, even if the port was 0.
        """
        if self._open is not None:
            (runner, acceptor), self._open = self._open, None
            await acceptor.close()
            transports = [connection.transport for connection in acceptor.connections]
            await runner.cleanup()
            # A closed connection stays open while the peer has unread data, even after the loop
            # ends.
            for transport in transports:
                if transport is not None:
                    transport.abort()
            await asyncio.sleep(0)
        if not keep_port:
            self._bound = None
