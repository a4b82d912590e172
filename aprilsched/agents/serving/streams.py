"""Server-sent events: frames, merged streams, and the streaming answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar

import msgspec
from aiohttp import web

T = TypeVar("T")

Event: TypeAlias = dict[str, Any]
Item: TypeAlias = Event | bytes

DONE = b"data: [DONE]\n\n"
"""The end of every stream."""

STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


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


async def send_stream(request: web.Request, items: AsyncGenerator[Item]) -> web.StreamResponse:
    """Stream `items` as the answer; close them when it ends or the client disconnects."""
    stream = web.StreamResponse(headers=STREAM_HEADERS)
    try:
        await stream.prepare(request)
        async with aclosing(items):
            async for item in items:
                await stream.write(frame_item(item))
    except ConnectionResetError:  # The client is gone.
        pass
    return stream
