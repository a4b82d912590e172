"""Sockets that notice a dead peer, and one that sends without end what HTTP passes over.

An HTTP library takes any number of interim answers, extensions of a chunk and zeros before its
length, and hands none of them on. Whoever bounds an answer by what is read of it would not see
them; the socket does.
"""

from __future__ import annotations

import errno
import socket
from typing import Any
from weakref import WeakValueDictionary

import aiohttp

__all__ = ["ENDLESS", "Inflow", "inflow_of", "probed_socket"]

ENDLESS = "it sends without end what HTTP passes over"
_PASSED_OVER = 4 * 2**20
"""Bytes, several times what a connection buffers and the longest headers together."""
_TCP_PROBES = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


class Inflow:
    """What one connection may still receive before a piece of an answer is read from it."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _PASSED_OVER

    def renew(self) -> None:
        """A piece of an answer was read."""
        self._left = _PASSED_OVER

    def count(self, received: int) -> None:
        """Raises OSError, which breaks the connection, if it is too much."""
        self._left -= received
        if self._left < 0:
            raise OSError(errno.EMSGSIZE, ENDLESS)


class _Socket(socket.socket):
    """A socket that counts what it receives, by either of the two calls that asyncio uses."""

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
"""By number, which only one open socket has."""


def probed_socket(address: Any) -> socket.socket:
    """A socket with TCP keep-alive.

    A machine that loses power says no goodbye; without these probes its streams would stay
    open for ever, since silence alone may be a pause.
    """
    family, kind, protocol, _, _ = address
    made = _Socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_PROBES:
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    _made[made.fileno()] = made
    return made


def inflow_of(response: aiohttp.ClientResponse) -> Inflow:
    """That of the connection on which `response` arrives; a new one if it is whole already."""
    connection = response.connection
    transport = None if connection is None else connection.transport
    found = None if transport is None else transport.get_extra_info("socket")
    made = None if found is None else _made.get(found.fileno())
    return Inflow() if made is None else made.inflow
