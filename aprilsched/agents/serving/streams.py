"""Server-sent events: frames, merged streams, and the streaming answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

import msgspec
from aiohttp import web

T = TypeVar("T")

Event: TypeAlias = dict[str, Any]
Item: TypeAlias = Event | bytes

DONE = b"data: [DONE]\n\n"
"""The end of every stream."""

STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    # nginx would pass the events on at the end of the stream.
    "X-Accel-Buffering": "no",
}
STREAM_STATUS: ContextVar[int] = ContextVar("STREAM_STATUS")
"""HTTP status that a stream would have if its end were known at its start."""
DISCONNECTED = 499
"""Status of a request whose client disconnects before the end of the answer, as in nginx."""
PING_S = 10.0
"""Seconds after which an empty event keeps a silent stream open."""


def frame_item(item: Item) -> bytes:
    """Return the bytes of `item` on the wire."""
    return item if isinstance(item, bytes) else b"data: " + msgspec.json.encode(item) + b"\n\n"


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of all streams as they arrive, each with the index of its stream."""
    waiting = {asyncio.ensure_future(anext(each)): index for index, each in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield index, item
                waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.gather(*(each.aclose() for each in streams), return_exceptions=True)


async def send_stream(
    request: web.Request, items: AsyncGenerator[Item], ping: bytes = b""
) -> web.StreamResponse:
    """Stream `items` as the answer; close them when it ends or the client disconnects.

    While none comes, `ping` is sent, unless it is empty.
    """
    stream = web.StreamResponse(headers=STREAM_HEADERS)
    loop = asyncio.get_running_loop()
    sent_at = loop.time()

    async def keep_open() -> None:
        with suppress(ConnectionResetError):
            while True:
                await asyncio.sleep(PING_S)
                if loop.time() >= sent_at + PING_S:
                    await stream.write(ping)

    pinging = asyncio.ensure_future(keep_open()) if ping else None
    try:
        await stream.prepare(request)
        async with aclosing(items):
            async for item in items:
                sent_at = loop.time()
                await stream.write(frame_item(item))
    except ConnectionResetError:
        STREAM_STATUS.set(DISCONNECTED)
    finally:
        if pinging is not None:
            pinging.cancel()
    return stream
