"""A TCP proxy whose connections a test can cut, so that a real server's answers break off."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from types import TracebackType

BLOCK = 65536


class CuttingProxy:
    """Passes bytes to `port` and back, and counts the requested generations."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.generations = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> CuttingProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Break every open connection, as a crash does; new connections are accepted."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Where the server is not there, the caller's connection breaks as well.
        with contextlib.suppress(OSError):
            async with self._kept(writer), self._upstream() as (answers, server):
                await asyncio.wait(
                    [
                        asyncio.ensure_future(self._pass(reader, server, count=True)),
                        asyncio.ensure_future(self._pass(answers, writer)),
                    ]
                )

    @contextlib.asynccontextmanager
    async def _upstream(
        self,
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        async with self._kept(writer):
            yield reader, writer

    @contextlib.asynccontextmanager
    async def _kept(self, writer: asyncio.StreamWriter) -> AsyncGenerator[None, None]:
        self._writers.add(writer)
        try:
            yield
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(BLOCK):
                if count:
                    self.generations += data.count(b"POST /generate ")
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
