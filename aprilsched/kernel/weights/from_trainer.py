"""Runs a publisher in the trainer's process when the scheduler is in another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import Engine, Fleet
from aprilsched.kernel.weights.external import ExternalWeights, Handshake
from aprilsched.kernel.weights.publisher import AdapterPublisher, WeightPublisher

log = logging.getLogger("aprilsched")


class FromTrainer:
    """Runs a publisher in the trainer's process, where the tensors are.

    ``rollouts.update_weights(FromTrainer(DistributedPublisher(weights), SGLangFleet(urls)))``
    pauses the engines and asks each for its version afterwards, as every update does. In between,
    the publisher moves the weights from the trainer's process to the engines of `fleet`. Make one
    object for all updates of a scheduler, so that connections and groups last from one to the next.

    Args:
        publisher: any publisher of full weights.
        fleet: the engines of the scheduler once more, under the same names. Only its list of
            engines is used; each is opened here before the first update. A fleet with a changing
            list (``SGLangListedFleet``, ``RayFleet``) lists its servers again before each update.

    Raises:
        ConfigError: if `publisher` publishes adapters, or nothing itself.
    """

    def __init__(self, publisher: WeightPublisher, fleet: Fleet) -> None:
        if isinstance(publisher, AdapterPublisher | ExternalWeights | Handshake):
            raise ConfigError(
                f"a {type(publisher).__name__} moves no tensors of the trainer; give it to "
                "update_weights() itself, or use paused_for_weights()."
            )
        self.publisher = publisher
        self._fleet = fleet
        self._opened: dict[str, Engine] = {}
        self._opening = asyncio.Lock()

    async def prepare(self, version: int) -> None:
        """Prepare the publisher."""
        await self.publisher.prepare(version)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Publish for a scheduler of the same process."""
        return await self.publisher.publish(version, engines)

    async def open(self, version: int) -> None:
        """Open the engines here, while they generate.

        An engine that cannot be opened does not take the version; the next update tries it again.
        """
        async with self._opening:
            if isinstance(self._fleet, ListedFleet):
                engines = await self._fleet.listed()
                names = {engine.name for engine in engines}
                await self._close([name for name in self._opened if name not in names])
            else:
                engines = self._fleet.engines
            closed = [each for each in engines if each.name not in self._opened]
            failures = await asyncio.gather(
                *(engine.open() for engine in closed), return_exceptions=True
            )
            for engine, failure in zip(closed, failures, strict=True):
                if failure is None:
                    self._opened[engine.name] = engine
                else:
                    log.error("%s does not take version %d: %r", engine.name, version, failure)

    def opened(self, names: Sequence[str]) -> Sequence[Engine]:
        """Return the engines of these names that are open here.

        Raises:
            ConfigError: if none is.
        """
        engines = [self._opened[name] for name in names if name in self._opened]
        if not engines:
            raise ConfigError(
                f"FromTrainer has opened {', '.join(self._opened) or 'no engine'}, and the "
                f"scheduler has paused {', '.join(names)}; give it a fleet of the same servers."
            )
        return engines

    async def send(self, version: int, names: Sequence[str]) -> None:
        """Load `version` into the engines of these names, which the scheduler has paused.

        Raises:
            ConfigError: if none of them is open here.
            Exception: what the publisher raises, or the first error if no engine took the weights.
        """
        engines = self.opened(names)
        try:
            outcomes = await self.publisher.publish(version, engines)
        except BaseException:
            await self._close(list(self._opened))
            raise
        failed = {name: error for name, error in outcomes.items() if error is not None}
        # The cause may be a restart, which an engine notices when it is opened again.
        await self._close(failed)
        if len(failed) == len(engines):
            raise next(iter(failed.values()))

    async def close(self) -> None:
        """Leave the engines' groups, and close the engines."""
        if isinstance(self.publisher, LastingPublisher):
            await self.publisher.aclose()
        await self._close(list(self._opened))

    async def _close(self, names: Iterable[str]) -> None:
        for name in names:
            await self._opened.pop(name).close()


@runtime_checkable
class ListedFleet(Protocol):
    """A fleet whose list of servers changes."""

    async def listed(self) -> Sequence[Engine]: ...


@runtime_checkable
class LastingPublisher(Protocol):
    """A publisher with connections or groups that last from one update to the next."""

    async def aclose(self) -> None: ...
