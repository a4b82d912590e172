"""The protocols of publishers, which bring new weights or adapters to the engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from aprilsched.kernel.engines.base import Engine

__all__ = [
    "AdapterPublisher",
    "ConcludingPublisher",
    "RepublishingPublisher",
    "WeightPublisher",
    "WholePublisher",
]


class WeightPublisher(Protocol):
    """Brings a new policy version to a set of engines."""

    async def prepare(self, version: int) -> None:
        """Do what can be done while the engines generate, such as writing files."""
        ...

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Bring `version` to all engines, which are paused, in parallel.

        Returns for each engine's name None, or the error for which it did not take the weights.
        The caller then asks each engine for its version and trusts only that.
        """
        ...


@runtime_checkable
class RepublishingPublisher(WeightPublisher, Protocol):
    """A publisher that can publish a version again, as long as it is the fleet's version.

    With it, an engine that comes back gets that version at once; otherwise it waits for the
    trainer's next version.
    """

    def holds(self, version: int) -> bool:
        """Whether `version` can still be published."""
        ...


@runtime_checkable
class WholePublisher(WeightPublisher, Protocol):
    """A publisher that reports whether an engine takes a version and its label in one call.

    If it does not, a store notes each update before it starts. If the process is killed in the
    middle, the next one uses no engine before another update.
    """

    @property
    def loads_whole(self) -> bool:
        """Whether an engine has either the old version or the new one at any time."""
        ...


@runtime_checkable
class ConcludingPublisher(WeightPublisher, Protocol):
    """A publisher that is notified when a call of ``update_weights()`` is over."""

    async def conclude(self) -> None:
        """End what waits for the update, whatever became of it.

        It is called once for each ``update_weights()`` call, after ``publish()`` has ended, and
        also where nothing was published: the version was refused, ``prepare()`` raised, no
        engine was there.
        """
        ...


@runtime_checkable
class AdapterPublisher(WeightPublisher, Protocol):
    """A publisher whose versions are LoRA adapters, each loaded in addition to those in use.

    `publish` is called while the engines generate. Requests of an older adapter end with that
    adapter; then `retire` is called.
    """

    def adapter_name(self, version: int) -> str:
        """The name of the adapter of `version` on the engines."""
        ...

    async def retire(self, version: int, engine: Engine) -> None:
        """Unload the adapter of `version` from `engine`; no request samples with it."""
        ...
