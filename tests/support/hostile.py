"""A server that answers probes like SGLang, and a generation with any bytes that a test gives.

It writes HTTP by hand, because a library refuses to write the errors that the tests need.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_PROBES: dict[str, Any] = {
    "/model_info": {"model_path": "m", "weight_version": "0"},
    "/server_info": {"version": "0.5.21", "incremental_streaming_output": True},
    "/openapi.json": {},
}

Answer = Callable[[], Iterable[bytes]]
"""Makes the pieces of an answer. They are written until they end or the client disconnects."""


class Hostile:
    """The answers of a server by path, and counts of what it wrote."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, Answer] = {}
        self.written = 0
        self.unsent = 0
        """Bytes of the last write that the operating system had not taken yet."""
        self.closed = 0
        """Number of connections that were closed after their pieces."""
        self.connections = 0
        self.headers: list[bytes] = []
        self.bodies: list[bytes] = []
        """Those of the calls that a test answers."""
        self.closes = True
        """Whether the connection ends with the pieces."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.headers.append(head)
                length = next(
                    (int(line[15:]) for line in head.split(b"\r\n") if _is_length(line)), 0
                )
                body = await reader.readexactly(length)
                path = head.split(b" ", 2)[1].decode()
                if path not in self.answers or b"logit_bias" in head:
                    writer.write(_plain(json.dumps(_PROBES.get(path, {})).encode()))
                    continue
                self.bodies.append(body)
                for piece in self.answers[path]():
                    writer.write(piece)
                    self.written += len(piece)
                    self.unsent = writer.transport.get_write_buffer_size()
                    await writer.drain()
                if self.closes:
                    self.closed += 1
                    # Not abort(), which would drop what the operating system has not taken yet:
                    # the last part of an answer whose reader is busy.
                    writer.close()
                    await writer.wait_closed()
                    return
        writer.transport.abort()


@asynccontextmanager
async def hostile() -> AsyncGenerator[Hostile]:
    """A server on a free loopback port."""
    found: list[Hostile] = []
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(found[0].serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    found.append(Hostile(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    try:
        yield found[0]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def chunked(*pieces: bytes) -> bytes:
    """The pieces as chunks of an HTTP body, without the chunk that ends it."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


def event(start: int, end: int, *, finish: str | None = None, index: int = 0) -> bytes:
    """A stream event with the tokens `start` to `end` of the request of an index."""
    meta: dict[str, Any] = {
        "finish_reason": None if finish is None else {"type": finish},
        "completion_tokens": end,
        "output_token_logprobs": [[-0.5, 7, None]] * (end - start),
        "output_token_logprobs_length": end,
    }
    if finish is not None:
        meta["weight_versions"] = [{"version": "0", "start": 0, "end": end}]
    body = json.dumps({"output_ids": [7] * (end - start), "meta_info": meta, "index": index})
    return b"data: " + body.encode() + b"\n\n"


def _plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _is_length(line: bytes) -> bool:
    return line.lower().startswith(b"content-length:")
