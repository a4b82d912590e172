"""How new weights reach the engines: one protocol, whoever moves the bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from aprilsched.engines.base import Engine

__all__ = ["AdapterPublisher", "RepublishingPublisher", "WeightPublisher"]


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


@runtime_checkable
class RepublishingPublisher(WeightPublisher, Protocol):
    """One that can publish a version again, as long as it is the fleet's.

    An engine that comes back is then brought to that version at once; otherwise it waits for the
    trainer's next one.
    """

    def holds(self, version: int) -> bool:
        """Whether `version` can still be published."""
        ...


@runtime_checkable
class AdapterPublisher(WeightPublisher, Protocol):
    """One whose versions are LoRA adapters, each loaded beside those that are in use.

    `publish` is called while the engines generate. What was sent under an older adapter ends
    under it; then `retire` is called.
    """

    def adapter_name(self, version: int) -> str:
        """What the adapter of `version` is called on the engines."""
        ...

    async def retire(self, version: int, engine: Engine) -> None:
        """Unload the adapter of `version` from `engine`; nothing samples with it any more."""
        ...
