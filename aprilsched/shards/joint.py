"""One publication of weights for the shards of one process, each of which publishes on its own.

A publisher that broadcasts has one group of ranks for all engines, and one that lends its memory
lends it once. So the shards wait for each other, and the publisher is called once with the engines
of all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from aprilsched.driver.callbacks import called_now
from aprilsched.engines.base import Engine
from aprilsched.errors import RefitError
from aprilsched.weights.base import RepublishingPublisher, WeightPublisher, WholePublisher

__all__ = ["JointUpdate", "Part", "RepublishingPart"]

_Results = Mapping[str, Exception | None]


class JointUpdate:
    """One update of several shards.

    Args:
        publisher: the trainer's publisher, prepared already.
        shards: names of the shards that publish here.
        wait_s: seconds that a shard waits here for the others to pause their engines. It publishes
            without those that need longer.
    """

    def __init__(
        self, publisher: WeightPublisher, shards: Iterable[str], *, wait_s: float = 0
    ) -> None:
        self.publisher = publisher
        self._awaited = set(shards)
        self._late: set[str] = set()
        self._wait_s = wait_s
        self._engines: dict[str, Sequence[Engine]] = {}
        self._version = 0
        self._all_there = asyncio.Event()
        self._published: asyncio.Task[Mapping[str, _Results]] | None = None
        self._over = False

    def part(self, shard: str) -> Part:
        """The publisher for one shard."""
        if isinstance(self.publisher, RepublishingPublisher):
            return RepublishingPart(self, shard)
        return Part(self, shard)

    def left(self, shard: str) -> None:
        """The update of a shard is over, or the shard publishes nothing."""
        self._awaited.discard(shard)
        if not self._awaited:
            self._all_there.set()

    def end(self) -> None:
        """The update is over for all shards. What is published later is for single engines."""
        self._over = True

    async def publish(self, shard: str, version: int, engines: Sequence[Engine]) -> _Results:
        """Publish with all others.

        Raises:
            RefitError: if the others did so without this shard.
        """
        if shard in self._late and not self._over:
            raise RefitError(f"{shard} needed more than {self._wait_s:g} s to pause its engines.")
        if self._over or shard not in self._awaited:
            return await self.publisher.publish(version, engines)
        self._engines[shard], self._version = engines, version
        self.left(shard)
        try:
            async with asyncio.timeout(self._wait_s):
                await self._all_there.wait()
        except TimeoutError:
            self._late |= self._awaited
            self._awaited.clear()
            self._all_there.set()
        except asyncio.CancelledError:
            self._engines.pop(shard, None)
            raise
        if self._published is None:
            self._published = asyncio.create_task(self._publish(), name="aprilsched update")
        # A shard that is cancelled must not end the publication for the others.
        return (await asyncio.shield(self._published))[shard]

    async def _publish(self) -> Mapping[str, _Results]:
        names = [engine.name for engines in self._engines.values() for engine in engines]
        if len(set(names)) < len(names):
            # The results could not be told apart. Names are addresses, except in simulated fleets.
            results = [
                await self.publisher.publish(self._version, engines)
                for engines in self._engines.values()
            ]
            return dict(zip(self._engines, results, strict=True))
        every = [engine for engines in self._engines.values() for engine in engines]
        outcome = await self.publisher.publish(self._version, every)
        return dict.fromkeys(self._engines, outcome)


class Part:
    """The publisher that one shard gets; its `publish` is that of the whole update.

    Attributes:
        joint: the update.
    """

    def __init__(self, joint: JointUpdate, shard: str) -> None:
        self.joint = joint
        self._shard = shard

    def leave(self) -> None:
        """Say that this shard does not publish with the others."""
        self.joint.left(self._shard)

    @property
    def loads_whole(self) -> bool:
        """Whether the trainer's publisher says so of itself."""
        publisher = self.joint.publisher
        return isinstance(publisher, WholePublisher) and publisher.loads_whole

    async def prepare(self, version: int) -> None:
        """Do nothing: the trainer's publisher is prepared once, before the update begins."""

    async def publish(self, version: int, engines: Sequence[Engine]) -> _Results:
        """Publish with the other shards; see
        :meth:`~aprilsched.weights.base.WeightPublisher.publish`."""
        return await self.joint.publish(self._shard, version, engines)


class RepublishingPart(Part):
    """A part of an update that can be published again."""

    def holds(self, version: int) -> bool:
        """Whether the trainer's publisher can publish `version` again."""
        publisher = self.joint.publisher
        return isinstance(publisher, RepublishingPublisher) and called_now(
            "the publisher", publisher.holds, version
        )
