"""The SGLang-compatible test server: a simulated engine behind a socket, from start to stop."""

from __future__ import annotations

import asyncio
from types import TracebackType

from aprilsched.engines.sim.config import SimConfig
from aprilsched.engines.sim.engine import SimEngine
from aprilsched.serving.listening import Listener
from aprilsched.testing.app import make_app
from aprilsched.testing.faults.broken import reset
from aprilsched.testing.faults.choosing import Faults
from aprilsched.testing.faults.engine_faults import EngineFaults
from aprilsched.testing.faults.middleware import spoiling
from aprilsched.testing.faults.script import FaultScript
from aprilsched.testing.served import ServedEngine

__all__ = ["SimServer"]


class SimServer:
    """A simulated engine at ``http://host:port``; an async context manager.

    Args:
        config: the modelled machine; with ``stream_at_pause=False`` it behaves like SGLang.
        host: address to listen on; the default is reachable from this machine only.
        port: port to listen on; 0 for any free one.
        admin_key: bearer token that control calls need; None leaves them open.
        time_scale: wall seconds for each modelled second.
        refit_seconds: modelled duration of a refit.
        faults: script of the faults that happen to it, from its start on.

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
        faults: FaultScript | None = None,
    ) -> None:
        self._listener = Listener(host, port)
        config = config or SimConfig(stream_at_pause=False)
        self.engine = SimEngine(
            f"sim-{port}", config, time_scale=time_scale, refit_seconds=refit_seconds
        )
        self._config = config
        self._admin_key = admin_key
        self._time_scale = time_scale
        self._served: ServedEngine | None = None
        self.faults = Faults(faults or FaultScript())
        """The faults of the script and how often they have happened."""
        self._engine_faults = EngineFaults(self.faults, self)

    @property
    def url(self) -> str:
        """The URL of the server; its port is known once the server is started."""
        return self._listener.url

    @property
    def listening(self) -> bool:
        """Whether the server is started, and not dead at the moment."""
        return self._listener.listening

    async def start(self) -> None:
        """Start to listen.

        Raises:
            ConfigError: if the address cannot be used.
        """
        await self.engine.open()
        self._served = ServedEngine(self.engine, self._config, time_scale=self._time_scale)
        await self._listen(self._served)
        self.faults.begin(asyncio.get_running_loop().time)
        self._engine_faults.begin()

    async def _listen(self, served: ServedEngine) -> None:
        outermost = [spoiling(self.faults, self._engine_faults)] if self.faults else []
        app = make_app(served, admin_key=self._admin_key, outermost=outermost)
        try:
            await self._listener.open(app)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Break the open connections and stop listening."""
        await self._engine_faults.end()
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
        """Start again after :meth:`crash`, at the same address, as a new process.

        The new process has the weights of version 0, or with `keeps_weights` those of the old one.

        Raises:
            ConfigError: if the address cannot be used any more.
        """
        before = self._served
        had = (before.model_path, before.label, self.engine.batcher.weights_key) if before else None
        await self.engine.restart()
        self._served = ServedEngine(self.engine, self._config, time_scale=self._time_scale)
        if keeps_weights and had is not None:
            await self._served.begin_with(*had)
        await self._listen(self._served)

    async def __aenter__(self) -> SimServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()
