"""Listens at one address with an aiohttp application."""

from __future__ import annotations

import asyncio
import os
from typing import cast

from aiohttp import web

from aprilsched.errors import ConfigError

__all__ = ["Listener", "check_port"]

_LARGEST_PORT = 2**16 - 1
_BACKLOG = 4096
"""Connections that may wait to be accepted, as many as Linux grants by default. With asyncio's 100
a burst of 1,000 clients waited for their second and third try."""
_CLOSE_S = 1.0
"""Seconds that open connections have when the listener closes."""


def check_port(port: int) -> None:
    """Refuse a port that there is not.

    Raises:
        ConfigError: if `port` is not from 0 (any) to 65535.
    """
    if not 0 <= port <= _LARGEST_PORT:
        raise ConfigError(f"port is {port}; give one from 0 (any) to {_LARGEST_PORT}.")


class Listener:
    """An address, and the server that listens there while it is open.

    Args:
        host: address to listen at; any address but loopback lets other machines connect.
        port: port to listen at; 0 for any free one.

    Raises:
        ConfigError: if the port is out of its range.
    """

    def __init__(self, host: str, port: int) -> None:
        check_port(port)
        self._host = host
        self._port = port
        self._bound: int | None = None
        self._open: tuple[web.AppRunner, asyncio.Server] | None = None

    @property
    def url(self) -> str:
        """The URL of the server; with port 0 its port is known once it has listened."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port if self._bound is None else self._bound}"

    @property
    def listening(self) -> bool:
        return self._open is not None

    @property
    def connections(self) -> list[web.RequestHandler]:
        """The open connections."""
        return [] if self._open is None else _connections(self._open[0])

    async def open(self, app: web.Application) -> None:
        """Start to listen. A handler whose client leaves is cancelled.

        Raises:
            ConfigError: if the address cannot be used.
        """
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=_CLOSE_S,
            access_log=None,
            # A body is uncompressed where it is read, which is bounded.
            auto_decompress=False,
        )
        port = self._port if self._bound is None else self._bound
        try:
            await runner.setup()
            listening = await asyncio.get_running_loop().create_server(
                cast(web.Server, runner.server), self._host, port, backlog=_BACKLOG
            )
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"Cannot listen on {self._host}:{port} ({os.strerror(error.errno or 0)}); give "
                "another host or port."
            ) from error
        except BaseException:
            await runner.cleanup()
            raise
        self._open = runner, listening
        self._bound = listening.sockets[0].getsockname()[1]

    async def close(self, *, keep_port: bool = False) -> None:
        """Stop to listen, and break what is still open after a second.

        With `keep_port` the next :meth:`open` listens at the same port, also where any was asked
        for.
        """
        if self._open is not None:
            (runner, listening), self._open = self._open, None
            # A connection that has been accepted and not made yet when the server closes stays open
            # for ever: its making fails, and nothing knows of it. So the last ones are made first.
            for accepting in listening.sockets:
                asyncio.get_running_loop().remove_reader(accepting)
            await asyncio.sleep(0)
            listening.close()
            await asyncio.sleep(0)
            transports = [connection.transport for connection in _connections(runner)]
            await runner.cleanup()
            # What the peer has not read keeps a connection open that was closed, also after the
            # loop has ended.
            for transport in transports:
                if transport is not None:
                    transport.abort()
            await asyncio.sleep(0)
        if not keep_port:
            self._bound = None


def _connections(runner: web.AppRunner) -> list[web.RequestHandler]:
    return [] if runner.server is None else list(runner.server.connections)
