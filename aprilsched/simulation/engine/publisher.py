"""A publisher for simulated engines, which load weights in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.weights.threads import Takers
from aprilsched.simulation.engine.sim_engine import SimEngine
from aprilsched.simulation.engine.toy_model import weights_key_of_version


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
        """Bring `version` to all `engines` in parallel; reject an engine that is not simulated."""
        takers: Takers[SimEngine] = Takers(engines, SimEngine, "take simulated weights")
        key = self._weights_key(version)
        await takers.each(lambda engine: engine.refit(version, key, complete=True))
        return takers.outcomes
