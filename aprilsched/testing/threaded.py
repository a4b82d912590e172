"""The SGLang-compatible test server in a separate thread, for tests without asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Self

from aprilsched.fronts.loop_thread import LoopThread
from aprilsched.testing.server import SimServer

_TIME_SCALE = 0.01


class ThreadedServer:
    """A :class:`SimServer` whose event loop runs in a separate thread; a context manager.

    Its methods block until they are done, and may be called from any thread. Clients may use
    asyncio or not, because the server never runs on a client's loop.

    Args:
        server: a server that is not started. The default models an H200 at a hundred times its
            speed.
    """

    def __init__(self, server: SimServer | None = None) -> None:
        self._server = server or SimServer(time_scale=_TIME_SCALE)
        self._running: LoopThread | None = None

    @property
    def url(self) -> str:
        """The URL of the server; its port is known once the server is started."""
        return self._server.url

    @property
    def listening(self) -> bool:
        """Whether the server is started and not crashed."""
        return self._server.listening

    def start(self) -> None:
        """Start the thread, and listen.

        Raises:
            ConfigError: if the address cannot be used.
            RuntimeError: if it is started already.
        """
        if self._running is not None:
            raise RuntimeError("The server is started already; start another one.")
        self._running = LoopThread("sglang test server")
        try:
            self._wait(self._server.start())
        except BaseException:
            self._end_thread()
            raise

    def stop(self) -> None:
        """Close every connection, stop listening and end the thread."""
        if self._running is None:
            return
        try:
            self._wait(self._server.stop())
        finally:
            self._end_thread()

    def crash(self) -> None:
        """Fail like a killed process: every connection is reset, and nothing listens."""
        self._wait(self._server.crash())

    def restart(self, *, keeps_weights: bool = False) -> None:
        """Listen again at the same address after :meth:`crash`, like a new process.

        Args:
            keeps_weights: whether to keep the previous weights instead of version 0.

        Raises:
            ConfigError: if the address can no longer be used.
        """
        self._wait(self._server.restart(keeps_weights=keeps_weights))

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        if self._running is None:
            work.close()
            raise RuntimeError("The server is not started; call start(), or use it with `with`.")
        asyncio.run_coroutine_threadsafe(work, self._running.loop).result()

    def _end_thread(self) -> None:
        if self._running is not None:
            thread, self._running = self._running, None
            thread.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
