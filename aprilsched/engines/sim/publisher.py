"""Publishers of new weights and adapters for simulated engines, without files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from aprilsched.engines.base import Engine
from aprilsched.engines.sim.engine import SimEngine
from aprilsched.engines.sim.toy_model import weights_key_of_version
from aprilsched.errors import EngineError, EngineRejected


class SimPublisher:
    """Publishes weights to simulated engines; every version has its own weights key.

    Args:
        weights_key: maps a version to its weights key. ``lambda version: 0`` publishes the same
            weights again and again, so that greedy tokens do not depend on when refits happened.
            (The engines start with the key of version 0: publish once before comparing.)
    """

    loads_whole = True

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
        """Refit all `engines` in parallel; an engine that is not simulated is refused."""
        key = self._weights_key(version)
        results = await asyncio.gather(*(_refit(engine, version, key) for engine in engines))
        return {engine.name: result for engine, result in zip(engines, results, strict=True)}


async def _refit(engine: Engine, version: int, key: int) -> Exception | None:
    if not isinstance(engine, SimEngine):
        return EngineRejected(engine.name, "SimPublisher refits only SimEngine.", status=501)
    try:
        await engine.refit(version, key, complete=True)
    except EngineError as error:
        return error
    return None


class SimAdapterPublisher:
    """Publishes adapters to simulated engines; every version has its own adapter.

    Args:
        weights_key: maps a version to the adapter's weights key.
    """

    def __init__(self, weights_key: Callable[[int], int] = weights_key_of_version) -> None:
        self._weights_key = weights_key

    def adapter_name(self, version: int) -> str:
        """The name of the adapter of `version` on the engines."""
        return f"policy-v{version}"

    def holds(self, version: int) -> bool:
        """Any version can be published again, because its key follows from its number."""
        return True

    async def prepare(self, version: int) -> None:
        """Do nothing: simulated adapters need no preparation."""

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Load the adapter of `version` on all `engines`, while they generate."""
        name, key = self.adapter_name(version), self._weights_key(version)
        results = await asyncio.gather(*(_adapt(engine, name, key) for engine in engines))
        return {engine.name: result for engine, result in zip(engines, results, strict=True)}

    async def retire(self, version: int, engine: Engine) -> None:
        """Unload the adapter of `version`, with which no request samples any more."""
        if isinstance(engine, SimEngine):
            await engine.unload_adapter(self.adapter_name(version))


async def _adapt(engine: Engine, name: str, key: int) -> Exception | None:
    if not isinstance(engine, SimEngine):
        why = "SimAdapterPublisher loads adapters only on SimEngine."
        return EngineRejected(engine.name, why, status=501)
    try:
        await engine.add_adapter(name, key)
    except EngineError as error:
        return error
    return None
