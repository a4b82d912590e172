"""Refits: a publisher moves the weights, and every engine says itself what it has afterwards.

- Whatever a publisher does (raises, hangs past its deadline, is cancelled), the refit ends with an
  answer for each engine. A publisher that ignores its cancellation is left behind, and said so.
- What counts is the engine's own word: the new version, the old one, or torn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aprilsched.coordinator.tasks import TaskKey, Tasks
from aprilsched.coordinator.watchdog import watched
from aprilsched.core.messages.commands import Refit, Retire
from aprilsched.core.messages.events import ControlFailed, Event, Refitted
from aprilsched.driver.callbacks import Overdue, called, raised
from aprilsched.engines.base import Engine
from aprilsched.errors import EngineError, TornWeights
from aprilsched.weights.base import AdapterPublisher, WeightPublisher

__all__ = ["RefitReport", "Refits"]

log = logging.getLogger("aprilsched")

_PUBLISHER = "the publisher"


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitReport:
    """What an update did.

    Attributes:
        version: the policy version that all engines in use have now.
        quarantined: engines that did not take it, with the cause; their rollouts go on on others.
        seconds: from the call to the last engine's answer, preparation included.
    """

    version: int
    quarantined: Mapping[str, str]
    seconds: float


class Refits:
    """Carries refits and what belongs to them out."""

    def __init__(
        self,
        *,
        engines: Mapping[str, Engine],
        feed: Callable[[Event], None],
        fleet_version: Callable[[], int],
        call_timeout_s: float,
        refit_timeout_s: float,
    ) -> None:
        self.publisher: WeightPublisher | None = None
        """Moves the version that is asked for now, and after that the fleet's."""
        self.failure: Exception | None = None
        """What the publisher raised, to be chained to the error the trainer gets."""
        self._fleets: WeightPublisher | None = None
        self._engines = engines
        self._feed = feed
        self._fleet_version = fleet_version
        self._call_timeout_s = call_timeout_s
        self._refit_timeout_s = refit_timeout_s
        self._tasks: Tasks | None = None
        self._calls = 0
        self._under_way: dict[TaskKey, Sequence[Engine]] = {}
        """The engines of each refit that goes on."""

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks

    # --- commands ------------------------------------------------------------------------------

    def refit(self, command: Refit) -> None:
        publisher = self._fleets if command.catch_up else self.publisher
        # Catching up ends with its engine; a refit of the whole fleet goes on for the others.
        kind = ("control", command.engines[0]) if command.catch_up else ("control",)
        # Taken now: one that leaves the fleet meanwhile is not among the engines any more.
        engines = [self._engines[name] for name in command.engines]
        key = self._start(kind, self._refit(command, publisher, engines))
        if self._tasks is not None:
            self._under_way = {k: e for k, e in self._under_way.items() if self._tasks.running(k)}
            self._under_way[key] = engines

    async def ended(self, engine: Engine) -> None:
        """Wait until no weights are brought into the engine any more."""
        if self._tasks is not None:
            refits = self._under_way.items()
            await self._tasks.ended([key for key, engines in refits if engine in engines])

    def keep_publisher(self) -> None:
        """The version that it moved is the fleet's now."""
        self._fleets = self.publisher

    def retire(self, command: Retire) -> None:
        publisher = self._fleets
        if isinstance(publisher, AdapterPublisher):
            self._start(("control", command.engine), self._retire(publisher, command))

    # --- work ----------------------------------------------------------------------------------

    def _start(self, kind: tuple[str, ...], work: Coroutine[Any, Any, None]) -> TaskKey:
        self._calls += 1
        key = (*kind, "refit", self._calls)
        if self._tasks is not None:
            self._tasks.start(key, work)
        return key

    async def _refit(
        self, command: Refit, publisher: WeightPublisher | None, engines: Sequence[Engine]
    ) -> None:
        causes = await self._publish(command, publisher, engines)
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                cause = causes.get(engine.name) or ""
                group.create_task(self._verify(command, engine, cause))

    async def _publish(
        self, command: Refit, publisher: WeightPublisher | None, engines: Sequence[Engine]
    ) -> Mapping[str, str]:
        """Bring the version in; for each engine why it failed, or an empty string."""
        if publisher is None:
            return dict.fromkeys(command.engines, "there is no publisher")
        self.failure = None
        what = f"the refit to version {command.version}"
        try:
            with watched(", ".join(command.engines), what):
                results = await called(
                    _PUBLISHER,
                    publisher.publish,
                    command.version,
                    engines,
                    within=self._refit_timeout_s,
                )
            return _causes(results)
        except Overdue:
            cause = f"the publisher did not finish within {self._refit_timeout_s:g} s"
            return dict.fromkeys(command.engines, cause)
        except Exception as error:
            # A publisher is the caller's code: whatever it raises ends this update, not the run.
            self.failure = error
            return dict.fromkeys(command.engines, raised(_PUBLISHER, error))

    async def _verify(self, command: Refit, engine: Engine, cause: str) -> None:
        """Believe only what the engine itself says of its version."""
        name = engine.name
        version: int | None
        try:
            version = await self._version(command, engine, cause)
        except TornWeights as error:
            version, cause = None, cause or str(error)
        except (EngineError, TimeoutError) as error:
            why = cause or str(error) or f"no answer within {self._call_timeout_s:g} s"
            self._feed(ControlFailed(engine=name, call="refit", cause=why))
            return
        self._feed(Refitted(engine=name, version=version, cause=cause, catch_up=command.catch_up))

    async def _version(self, command: Refit, engine: Engine, cause: str) -> int:
        async with asyncio.timeout(self._call_timeout_s):
            version = await engine.version()
        if command.beside:
            # The label is the base model's. An adapter is there if loading it did not fail.
            return self._fleet_version() if cause else command.version
        return version

    async def _retire(self, publisher: AdapterPublisher, command: Retire) -> None:
        try:
            await called(
                _PUBLISHER,
                publisher.retire,
                command.version,
                self._engines[command.engine],
                within=self._refit_timeout_s,
            )
        except Exception as error:
            log.warning(
                "%s keeps the adapter of version %d: %r", command.engine, command.version, error
            )


def _causes(results: Mapping[str, Exception | None]) -> Mapping[str, str]:
    """For each engine why it did not take the weights, as the publisher says."""
    if not isinstance(results, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"publish() returned a {type(results).__name__}; return a mapping from each engine's "
            "name to None, or to the exception that says why it did not take the weights"
        )
    # An exception without words (TimeoutError()) is one nevertheless.
    return {
        name: "" if error is None else str(error) or repr(error) for name, error in results.items()
    }
