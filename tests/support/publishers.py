"""Publishers of simulated weights for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aprilsched import SimPublisher
from aprilsched.kernel.engines.base import Engine


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
