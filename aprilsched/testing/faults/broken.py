"""Connections that end as no server ends them, and waits that may have no end."""

from __future__ import annotations

import asyncio
import math
import socket
import struct

__all__ = ["Broken", "reset", "wait"]

_NO_LINGER = struct.pack("ii", 1, 0)


class Broken(Exception):
    """The connection of the call that this ends is to be reset."""


def reset(transport: asyncio.BaseTransport | None) -> None:
    """Close with a TCP RST: the peer sees a broken connection and no end of a stream."""
    if not isinstance(transport, asyncio.WriteTransport):
        return
    held: socket.socket | None = transport.get_extra_info("socket")
    if held is not None and held.fileno() >= 0:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


async def wait(seconds: float) -> None:
    """Sleep; for ever, if they are infinite."""
    if math.isfinite(seconds):
        await asyncio.sleep(seconds)
    else:
        await asyncio.Event().wait()
