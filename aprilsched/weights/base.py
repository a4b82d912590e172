"""How new weights reach the engines: one protocol, whoever moves the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from aprilsched.engines.base import Engine

__all__ = ["WeightPublisher"]


class WeightPublisher(Protocol):
    """Brings one new policy version into a set of engines."""

    async def prepare(self, version: int) -> None:
        """Everything that can be done while the engines still generate (writing files, say)."""
        ...

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Bring `version` into every engine, all of them paused, in parallel.

        Returns for each engine's name None, or why it did not take the weights. The caller
        asks each engine which version it has afterwards and believes only that.
        """
        ...
