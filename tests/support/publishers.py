"""Publishers of simulated weights for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aprilsched import SimPublisher
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.weights.threads import Takers
from aprilsched.simulation.engine import SimEngine
from aprilsched.simulation.engine.toy_model import weights_key_of_version


class Once:
    """A publisher that publishes a version once and cannot publish it again."""

    def __init__(self) -> None:
        self._sim = SimPublisher()

    async def prepare(self, version: int) -> None:
        await self._sim.prepare(version)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        return await self._sim.publish(version, engines)


class SimAdapterPublisher:
    """Publishes adapters while the engines generate; every version has its own."""

    def holds(self, version: int) -> bool:
        return True

    async def prepare(self, version: int) -> None: ...

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        takers: Takers[SimEngine] = Takers(engines, SimEngine, "take simulated weights")
        name, key = self.adapter_name(version), weights_key_of_version(version)
        await takers.each(lambda engine: engine.add_adapter(name, key))
        return takers.outcomes

    def adapter_name(self, version: int) -> str:
        return f"policy-v{version}"

    async def retire(self, version: int, engine: Engine) -> None:
        assert isinstance(engine, SimEngine)
        await engine.unload_adapter(self.adapter_name(version))
