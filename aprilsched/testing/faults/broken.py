"""Broken connections, and waits that may be endless."""

from __future__ import annotations

import asyncio
import math
import socket
import struct

__all__ = ["Broken", "reset", "wait"]

_NO_LINGER = struct.pack("ii", 1, 0)


class Broken(Exception):
    """Ends a call whose connection must be reset."""


def reset(transport: asyncio.BaseTransport | None) -> None:
    """Close with a TCP RST: the peer sees a broken connection, and no end of the stream."""
    if not isinstance(transport, asyncio.WriteTransport):
        return
    held: socket.socket | None = transport.get_extra_info("socket")
    if held is not None and held.fileno() >= 0:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


async def wait(seconds: float) -> None:
    """Sleep for `seconds`, which may be infinite."""
    if math.isfinite(seconds):
        await asyncio.sleep(seconds)
    else:
        await asyncio.Event().wait()
