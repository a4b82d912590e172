"""A fleet of simulated engines, and publishers of weights and adapters for it, without files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from aprilsched.engines.base import Engine
from aprilsched.engines.sim.settings import SimConfig
from aprilsched.engines.sim.sim_engine import PAUSE_SECONDS, SimEngine
from aprilsched.engines.sim.toy_model import weights_key_of_version
from aprilsched.errors import ConfigError, EngineError, EngineRejected
from aprilsched.timing.model import H200_QWEN3_4B, StepTimeModel


class SimFleet:
    """Engines "sim-0", "sim-1", … that need no GPU and no server.

    Args:
        engines: number of engines.
        time_scale: loop seconds for each modelled second (1.0 under a virtual clock).
        refit_seconds, pause_seconds: as in :class:`~aprilsched.engines.sim.sim_engine.SimEngine`.

    The other arguments are those of :class:`~aprilsched.engines.sim.settings.SimConfig`.

    Raises:
        ConfigError: if a number is out of its range.
    """

    def __init__(
        self,
        engines: int = 1,
        *,
        timing: StepTimeModel = H200_QWEN3_4B,
        max_running: int = 512,
        kv_tokens: int = 1_000_000,
        stream_interval: int = 64,
        time_scale: float = 1.0,
        vocab_size: int = 32_000,
        eos_token_id: int | None = None,
        refit_seconds: float = 0.0,
        pause_seconds: float = PAUSE_SECONDS,
        stream_at_pause: bool = True,
    ) -> None:
        if engines < 1:
            raise ConfigError(f"engines is {engines}; a fleet needs at least 1.")
        config = SimConfig(
            timing=timing,
            max_running=max_running,
            kv_tokens=kv_tokens,
            stream_interval=stream_interval,
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            stream_at_pause=stream_at_pause,
        )
        self.config = config
        self._engines = tuple(
            SimEngine(
                f"sim-{index}",
                config,
                time_scale=time_scale,
                refit_seconds=refit_seconds,
                pause_seconds=pause_seconds,
            )
            for index in range(engines)
        )

    @property
    def engines(self) -> Sequence[SimEngine]:
        return self._engines

    async def open(self) -> None:
        """Open every engine; this cannot fail."""
        for engine in self._engines:
            await engine.open()

    async def close(self) -> None:
        """Close every engine; see :meth:`~aprilsched.engines.sim.sim_engine.SimEngine.close`."""
        for engine in self._engines:
            await engine.close()


# --- publisher -----------------------------------------------------------------------------------


class _KeyPublisher:
    """Publishes weights keys to simulated engines; every version has its own.

    Args:
        weights_key: maps a version to its weights key.
    """

    def __init__(self, weights_key: Callable[[int], int] = weights_key_of_version) -> None:
        self._weights_key = weights_key

    def holds(self, version: int) -> bool:
        """Any version can be published again, because its key follows from its number."""
        return True

    async def prepare(self, version: int) -> None:
        """Do nothing: simulated weights need no preparation."""

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Bring `version` to all `engines` in parallel; one that is not simulated is refused."""
        key = self._weights_key(version)
        results = await asyncio.gather(*(self._try(engine, version, key) for engine in engines))
        return {engine.name: result for engine, result in zip(engines, results, strict=True)}

    async def _try(self, engine: Engine, version: int, key: int) -> Exception | None:
        if not isinstance(engine, SimEngine):
            why = f"{type(self).__name__} publishes only to SimEngine."
            return EngineRejected(engine.name, why, status=501)
        try:
            await self._give(engine, version, key)
        except EngineError as error:
            return error
        return None

    async def _give(self, engine: SimEngine, version: int, key: int) -> None:
        raise NotImplementedError


class SimPublisher(_KeyPublisher):
    """Publishes weights to simulated engines; every version has its own weights key.

    Args:
        weights_key: maps a version to its weights key. ``lambda version: 0`` publishes the same
            weights again and again, so that greedy tokens do not depend on when refits happened.
            (The engines start with the key of version 0: publish once before comparing.)
    """

    loads_whole = True

    async def _give(self, engine: SimEngine, version: int, key: int) -> None:
        await engine.refit(version, key, complete=True)


class SimAdapterPublisher(_KeyPublisher):
    """Publishes adapters to simulated engines, while they generate; every version has its own.

    Args:
        weights_key: maps a version to the adapter's weights key.
    """

    def adapter_name(self, version: int) -> str:
        """The name of the adapter of `version` on the engines."""
        return f"policy-v{version}"

    async def retire(self, version: int, engine: Engine) -> None:
        """Unload the adapter of `version`, with which no request samples any more."""
        if isinstance(engine, SimEngine):
            await engine.unload_adapter(self.adapter_name(version))

    async def _give(self, engine: SimEngine, version: int, key: int) -> None:
        await engine.add_adapter(self.adapter_name(version), key)
