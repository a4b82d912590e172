"""Sockets that notice a dead peer, and a server that sends endless data outside of the body.

An HTTP library skips any number of interim answers, chunk extensions and zeros before a chunk's
length, and reports none of them. A bound on the body that was read would miss them; a counter in
the socket does not.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import resource
import socket
from typing import Any
from weakref import WeakValueDictionary

import aiohttp

_log = logging.getLogger(__name__)


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
    would stay open forever, because a silent stream may be a paused one.
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


def generation_socket(address: Any) -> socket.socket:
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


class Connector(aiohttp.TCPConnector):
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
            if abs(now - Connector._warned) >= _WARNING_INTERVAL_S:
                Connector._warned = now
                _log.warning("requests wait for free file descriptors; raise `ulimit -n`")
            await asyncio.sleep(_DESCRIPTORS_RETRY_S)


def inflow_of(response: aiohttp.ClientResponse) -> Inflow:
    """The counter of the connection of `response`; a new one if `response` is complete already."""
    connection = response.connection
    transport = None if connection is None else connection.transport
    found = None if transport is None else transport.get_extra_info("socket")
    made = None if found is None else _made.get(found.fileno())
    return Inflow() if made is None else made.inflow
