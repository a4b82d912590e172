"""Refits engines: a publisher moves the weights, and then every engine is asked for its version.

- Whatever a publisher does (raises, exceeds its timeout, is cancelled), the refit ends with a
  result for each engine. A publisher that ignores its cancellation is left behind, and this is
  logged.
- Only the engine's own answer counts: the new version, the old version, or inconsistent weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from aprilsched.errors import EngineError, InconsistentWeights
from aprilsched.kernel.core.messages.events import ControlFailed, Refitted
from aprilsched.kernel.core.messages.facts import AdapterRetired, RefitBegun
from aprilsched.kernel.engines.base import Engine, HasLabel
from aprilsched.kernel.shell.callbacks import Overdue, called, raised
from aprilsched.kernel.shell.tasks import Part, Shell, TaskKey
from aprilsched.kernel.shell.watchdog import watched
from aprilsched.kernel.weights.external import ExternalWeights, FollowedWeights, Handshake
from aprilsched.kernel.weights.publisher import (
    AdapterPublisher,
    ConcludingPublisher,
    WeightPublisher,
)

log = logging.getLogger("aprilsched")

_PUBLISHER = "the publisher"


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitReport:
    """The result of an update.

    Attributes:
        version: the policy version that all engines in use have now; with rolling refits, the one
            that each of them takes when it is free.
        quarantined: engines that did not take the version, with the cause; their rollouts continue
            on other engines.
        seconds: time from the call to the last engine's answer, including the preparation.
    """

    version: int
    quarantined: Mapping[str, str]
    seconds: float


class Refits(Part):
    """Carries out refits, and the removal of adapters that are no longer used."""

    def __init__(
        self,
        shell: Shell,
        *,
        fleet_version: Callable[[], int],
        is_mine: Callable[[Engine], Awaitable[bool]],
    ) -> None:
        super().__init__(shell)
        self._is_mine = is_mine
        self.publisher: WeightPublisher | None = None
        """Publisher of the latest update, whether it succeeded or not."""
        self.failure: Exception | None = None
        """The publisher's exception; the trainer's error is chained to it."""
        self._fleets: WeightPublisher | None = None
        """Publisher of the version that the fleet has."""
        self._fleet_version = fleet_version
        self._call_timeout_s = shell.config.timeouts.control_s
        self._refit_timeout_s = shell.config.timeouts.refit_s
        self._under_way: dict[TaskKey, Sequence[Engine]] = {}
        """The engines of each refit that has not ended."""
        self._publishing: list[WeightPublisher | None] = []
        """Publishers that are publishing now."""
        self._concluding: list[ConcludingPublisher] = []
        """The publishers in `_publishing` whose call was cancelled."""

    # --- commands ------------------------------------------------------------------------------

    def refit(self, command: RefitBegun) -> None:
        if command.followed:
            self.publisher = FollowedWeights()
            log.info("version %d was loaded by another client and is followed", command.version)
        publisher = self._fleets if command.catch_up else self.publisher
        # A catch-up refit ends with its engine; a refit of the fleet continues for the others.
        kind = ("control", command.engines[0]) if command.catch_up else ("control",)
        # Looked up now, because an engine that leaves the fleet is removed from the mapping.
        engines = [self._engines[name] for name in command.engines]
        # Noted before the task runs: the call may be cancelled at this very moment.
        self._publishing.append(publisher)
        work = self._refit(command, publisher, engines)
        key = self._tasks.start_another((*kind, "refit"), work)
        self._under_way = {k: e for k, e in self._under_way.items() if self._tasks.running(k)}
        self._under_way[key] = engines

    async def ended(self, engine: Engine) -> None:
        """Wait until no refit of the engine is open."""
        refits = self._under_way.items()
        await self._tasks.ended([key for key, engines in refits if engine in engines])

    def keep_publisher(self) -> None:
        """Remember the publisher of the latest update, because its version is the fleet's now."""
        self._fleets = self.publisher

    async def conclude(self, publisher: ConcludingPublisher) -> None:
        """Notify a publisher that the call of its update is over.

        If it still publishes, which continues after a cancelled call, it is notified at the end of
        the publishing."""
        if publisher in self._publishing:
            self._concluding.append(publisher)
            return
        try:
            await called(_PUBLISHER, publisher.conclude, within=self._refit_timeout_s)
        except Overdue:
            log.warning("the publisher did not conclude within %g s", self._refit_timeout_s)
        except Exception as error:
            log.warning("the publisher did not conclude: %r", error)

    def retire(self, command: AdapterRetired) -> None:
        publisher = self._fleets
        if isinstance(publisher, AdapterPublisher):
            kind = ("control", command.engine, "refit")
            self._tasks.start_another(kind, self._retire(publisher, command))

    # --- work ----------------------------------------------------------------------------------

    async def _refit(
        self, command: RefitBegun, publisher: WeightPublisher | None, engines: Sequence[Engine]
    ) -> None:
        try:
            if not (await self._are_mine(publisher, engines)):
                return
            causes = await self._publish(command, publisher, engines)
            if not await self._are_mine(publisher, engines):
                return
        finally:
            self._publishing.remove(publisher)
        if isinstance(publisher, ConcludingPublisher) and publisher in self._concluding:
            self._concluding.remove(publisher)
            await self.conclude(publisher)
        async with asyncio.TaskGroup() as group:
            for engine in engines:
                cause = causes.get(engine.name) or ""
                group.create_task(self._verify(command, engine, cause))

    async def _are_mine(self, publisher: WeightPublisher | None, engines: Sequence[Engine]) -> bool:
        """Whether no other client has continued an engine; otherwise the scheduler ends."""
        if moves_elsewhere(publisher):
            return True
        return all(await asyncio.gather(*map(self._is_mine, engines)))

    async def _publish(
        self, command: RefitBegun, publisher: WeightPublisher | None, engines: Sequence[Engine]
    ) -> Mapping[str, str]:
        """Load the version into the engines; returns for each why it failed, or an empty string."""
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
            # A publisher is the caller's code. Its errors end this update but not the run.
            self.failure = error
            return dict.fromkeys(command.engines, raised(_PUBLISHER, error))

    async def _verify(self, command: RefitBegun, engine: Engine, cause: str) -> None:
        """Ask the engine for its version, and report the result to the core."""
        name = engine.name
        version: int | None
        try:
            version = await self._version(command, engine, cause)
        except InconsistentWeights as error:
            version, cause = None, cause or str(error)
        except (EngineError, TimeoutError) as error:
            why = cause or str(error) or f"no answer within {self._call_timeout_s:g} s"
            self._feed(ControlFailed(engine=name, call="refit", cause=why))
            return
        self._feed(
            Refitted(
                engine=name,
                version=version,
                cause=cause,
                catch_up=command.catch_up,
                followed=command.followed,
            )
        )

    async def _version(self, command: RefitBegun, engine: Engine, cause: str) -> int:
        async with asyncio.timeout(self._call_timeout_s):
            # After a failed refit a restarted process may answer. The engine is then opened again,
            # because its recorded state is wrong: it is not paused, for example.
            version = await (engine.verify() if cause else engine.version())
            is_loaded = version == command.version and not (cause or command.followed)
            if is_loaded and isinstance(engine, HasLabel):
                await engine.keep_label()  # The trainer may have set a decimal number.
        if command.adapter:
            # The engine's version is that of the base model. The adapter is there if loading it
            # did not fail.
            return self._fleet_version() if cause else command.version
        return version

    async def _retire(self, publisher: AdapterPublisher, command: AdapterRetired) -> None:
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


def moves_elsewhere(publisher: WeightPublisher | None) -> bool:
    """Whether the trainer brings the weights by its own calls, which may pause and continue."""
    return isinstance(publisher, ExternalWeights | FollowedWeights | Handshake)


def _causes(results: Mapping[str, Exception | None]) -> Mapping[str, str]:
    """For each engine why it did not take the weights, by the publisher, or an empty string."""
    if not isinstance(results, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"publish() returned a {type(results).__name__}; return a mapping from each engine's "
            "name to None, or to the exception that kept it from the weights"
        )
    # An exception without a message, such as TimeoutError(), also means failure.
    return {
        name: "" if error is None else str(error) or repr(error) for name, error in results.items()
    }
