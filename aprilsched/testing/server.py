"""The SGLang-compatible test server: a simulated engine behind a socket, from start to stop."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Self

from aiohttp.typedefs import Middleware

from aprilsched.agents.serving.listener import Listener
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.engine.sim_engine import SimEngine
from aprilsched.testing.app import app_of
from aprilsched.testing.served import DrawnLengths, ServedEngine

_NO_LINGER = struct.pack("ii", 1, 0)


def reset(transport: asyncio.BaseTransport | None) -> None:
    """Close with a TCP RST: the peer sees a broken connection, not the end of a stream."""
    if not isinstance(transport, asyncio.WriteTransport):
        return
    connected: socket.socket | None = transport.get_extra_info("socket")
    if connected is not None and connected.fileno() >= 0:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


class SimServer:
    """A simulated engine at ``http://host:port``; an async context manager.

    Args:
        config: the modelled machine; with ``stream_at_pause=False``, and with several ranks
            ``rank_rule="round_robin"``, it behaves like SGLang.
        host: address to listen on; the default is reachable from this machine only.
        port: port to listen on; 0 for any free one.
        admin_key: bearer token that control calls need; None leaves them open.
        time_scale: wall seconds for each modelled second.
        refit_seconds: modelled duration of a refit.
        lengths: lengths of responses without ``ignore_eos``; servers of one fleet share the object.
            None gives every response ``max_new_tokens``.
        middlewares: aiohttp middlewares that see all calls and responses, for failure tests.

    Raises:
        ConfigError: if a number is out of its range.
    """

    def __init__(
        self,
        config: SimConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        admin_key: str | None = None,
        time_scale: float = 1.0,
        refit_seconds: float = 0.0,
        lengths: DrawnLengths | None = None,
        middlewares: Sequence[Middleware] = (),
    ) -> None:
        self._listener = Listener(host, port, descriptors=1)
        config = config or SimConfig(stream_at_pause=False)
        self.engine = SimEngine(
            f"sim-{port}", config, time_scale=time_scale, refit_seconds=refit_seconds
        )
        self._config, self._lengths = config, lengths
        self._admin_key = admin_key
        self._time_scale = time_scale
        self._served: ServedEngine | None = None
        self._middlewares = middlewares

    @property
    def url(self) -> str:
        """The URL of the server; its port is known once the server is started."""
        return self._listener.url

    @property
    def listening(self) -> bool:
        """Whether the server is started and not crashed."""
        return self._listener.listening

    async def start(self) -> None:
        """Start listening.

        Raises:
            ConfigError: if the address cannot be used.
        """
        await self.engine.open()
        self._served = self._process()
        await self._listen(self._served)

    def _process(self) -> ServedEngine:
        """Return a new process of the server."""
        return ServedEngine(
            self.engine, self._config, time_scale=self._time_scale, lengths=self._lengths
        )

    async def _listen(self, served: ServedEngine) -> None:
        app = app_of(served, admin_key=self._admin_key, outermost=self._middlewares)
        try:
            await self._listener.open(app)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Break the open connections and stop listening."""
        if self._served is not None:
            self._served.cancel_late_aborts()
        await self.engine.close()
        await self._listener.close()

    async def crash(self) -> None:
        """Fail like a killed process: every connection is reset, and nothing listens."""
        if self._served is not None:
            self._served.cancel_late_aborts()
        self.engine.crash()
        for connection in self._listener.connections:
            reset(connection.transport)
        await self._listener.close(keep_port=True)

    async def restart(self, *, keeps_weights: bool = False) -> None:
        """Restart after :meth:`crash`, at the same address, as a new process would.

        The server has the weights of version 0, or its previous weights with `keeps_weights`.

        Raises:
            ConfigError: if the address can no longer be used.
        """
        before = self._served
        had = (before.model_path, before.label, self.engine.batcher.weights_key) if before else None
        await self.engine.restart()
        self._served = self._process()
        if keeps_weights and had is not None:
            await self._served.begin_with(*had)
        await self._listen(self._served)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
