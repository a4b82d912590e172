"""The scheduler behind a gateway: what a handler asks of it, and what it delivers.

Invariants:
- Every response that a client waits for ends: with its rollout, with an abort, or with a cause.
- A pause lasts until the continue, whatever updates come in between.
- Control calls are carried out one at a time, in the order in which they came.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from aiohttp import web

from aprilsched.coordinator.prompt_queue import PromptQueue
from aprilsched.coordinator.prompts import checked
from aprilsched.coordinator.refits import RefitReport
from aprilsched.coordinator.rollouts import RolloutScheduler
from aprilsched.core.config import SchedulerConfig
from aprilsched.core.messages import events as ev
from aprilsched.core.state.engine_control import Mode
from aprilsched.engines.base import Fleet
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.errors import AprilschedError, InvariantViolation, RefitError
from aprilsched.gateway.responses import Response, Responses
from aprilsched.gateway.settings import GatewaySettings, for_clients
from aprilsched.gateway.updates import FromDisk
from aprilsched.telemetry.base import AnyListener
from aprilsched.types import Prompt, Segment
from aprilsched.weights.base import WeightPublisher
from aprilsched.weights.external import ExternalWeights

__all__ = ["SERVICE", "Service"]

log = logging.getLogger("aprilsched")

_AGAIN_S = 1.0
"""Seconds after which a batch is asked for again that no engine can generate before an update."""


class _Rollouts(RolloutScheduler):
    """The scheduler with the three events that a gateway has beside those of a trainer."""

    def hold(self, *, held: bool) -> None:
        """Pause the engines with the requests inside them, or let them generate again."""
        self._feed(ev.HoldRequested() if held else ev.HoldEnded())

    def withdraw(self, group_id: int, cause: str) -> None:
        """Drop a group that nobody wants any more."""
        self._feed(ev.GroupWithdrawn(group_id=group_id, cause=cause))


class Service:
    """A fleet and its scheduler, as the handlers of a gateway see them.

    Args:
        fleet: the engines; they are opened and closed with the service.
        settings: how much it takes on.
        config: settings of the scheduler; those for batches of a trainer are replaced.
        listeners: telemetry of the run.

    Raises:
        ConfigError: if a setting cannot work.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        settings: GatewaySettings,
        config: SchedulerConfig,
        listeners: Sequence[AnyListener] = (),
    ) -> None:
        self.settings = settings
        self.fleet = fleet
        self.responses = Responses(withdraw=self._withdraw, versions=self._versions)
        self.random_seed = secrets.randbelow(2**31)
        """Distinguishes this process from a later one at its address, as a server's seed does."""
        self.held = False
        """Whether a client has paused the fleet."""
        self.draining = False
        """Whether no new requests are taken, because the gateway stops."""
        self.model_path = ""
        self._failed = asyncio.Event()
        self._failure: AprilschedError | None = None
        """The error that has ended the scheduler, if one has."""
        self._prompts = PromptQueue(together_s=0)
        self._labels: dict[int, str] = {}
        self._config = for_clients(config, settings.max_requests)
        self._rollouts = _Rollouts(
            fleet, self._prompts, config=self._config, listeners=[self.responses, *listeners]
        )
        self._control = asyncio.Lock()
        self._delivering: asyncio.Task[None] | None = None
        self._closing = AsyncExitStack()

    # --- what the handlers ask -----------------------------------------------------------------

    @property
    def label(self) -> str:
        """The label of the fleet's weights, as the client that loaded them has named it."""
        return self.label_of(self._rollouts.version)

    def label_of(self, version: int) -> str:
        """The label of a version; a version that no client has named is a decimal number."""
        return self._labels.get(version, str(version))

    @property
    def in_use(self) -> list[str]:
        """Names of the engines that are in use."""
        return list(self._rollouts.state.fleet.control.engines)

    def modes(self) -> dict[str, Mode]:
        """The mode of each engine that is in use."""
        engines = self._rollouts.state.fleet.control.engines
        return {name: control.mode for name, control in engines.items()}

    def running(self) -> int:
        """Number of requests that are with an engine."""
        return self._rollouts.state.in_flight.open_attempts

    def waiting(self) -> int:
        """Number of requests that are with no engine: not launched yet, or waiting to be sent."""
        return self.responses.to_launch + len(self._rollouts.state.in_flight.queue)

    @property
    def vocab_size(self) -> int | None:
        """Smallest number of token ids among the engines that tell it."""
        known = [
            engine.facts.vocab_size
            for engine in self.fleet.engines
            if isinstance(engine, SGLangEngine) and engine.facts.vocab_size is not None
        ]
        return min(known, default=None)

    # --- responses -----------------------------------------------------------------------------

    def ask(self, rid: str, prompt: Callable[[str], Prompt]) -> Response:
        """Begin a response to the prompt that `prompt` makes with the name that it is given.

        Raises:
            ConfigError: if the prompt cannot be used.
        """
        response, made = self.responses.open(rid, lambda key: checked(prompt(key), 1))
        self._prompts.put(made)
        return response

    def _withdraw(self, group_id: int, cause: str) -> None:
        self._rollouts.withdraw(group_id, cause)

    def _versions(self, group_id: int) -> tuple[tuple[Segment, ...], bool]:
        group = self._rollouts.state.in_flight.groups.get(group_id)
        if group is None:
            return (), False
        (member,) = group.members
        sure = member.request is None or not member.request.unsure
        return member.log.segments(), member.log.exact and sure

    # --- control calls -------------------------------------------------------------------------

    async def pause(self) -> None:
        """Pause the fleet with the requests inside; returns when every engine in use is paused.

        Raises:
            TimeoutError: if an engine is not paused in time. The pause still holds.
        """
        async with self._control:
            await self._hold()

    async def resume(self) -> None:
        """End the pause; returns when every engine in use generates again.

        Raises:
            TimeoutError: if an engine does not continue in time.
        """
        async with self._control:
            await self._end_hold()

    async def flush(self) -> bool:
        """Drop the cached KV of all engines; returns False while requests run."""
        async with self._control:
            if not self.held and self.running() + self.waiting():
                return False
            held = self.held
            await self._hold()
            try:
                engines = [engine for engine in self.fleet.engines if engine.name in self.in_use]
                await asyncio.gather(*(engine.flush() for engine in engines))
            finally:
                if not held:
                    await self._end_hold()
            return True

    async def load(self, path: str, label: str | None) -> RefitReport:
        """Load the weights in `path` into every engine, and name them `label`.

        Raises:
            RefitError: if no engine has loaded them.
        """
        report = await self._update(FromDisk(path), label)
        self.model_path = path
        return report

    async def relabel(self, label: str) -> RefitReport:
        """Take the weights that somebody has loaded into the engines already, under a new label.

        Raises:
            RefitError: if no engine takes the label.
        """
        return await self._update(ExternalWeights(label=True), label)

    async def _update(self, publisher: WeightPublisher, label: str | None) -> RefitReport:
        async with self._control:
            version = self._rollouts.version + 1
            # Named before it is loaded: tokens of the new weights may arrive at once.
            self._labels[version] = str(version) if label is None else label
            return await self._rollouts.update_weights(publisher, version=version)

    async def _hold(self) -> None:
        self.held = True
        self._rollouts.hold(held=True)
        await self._until(self._stands_still)

    async def _end_hold(self) -> None:
        self.held = False
        self._rollouts.hold(held=False)
        # An engine that runs is asked for its version before it gets its first request.
        await self._until(lambda mode, _: mode in (Mode.RUNNING, Mode.VERIFYING))

    def _stands_still(self, mode: Mode, engine: str) -> bool:
        # The scheduler does not pause an engine that has nothing to do; it sends it nothing.
        idle = not self._rollouts.state.in_flight.open[engine]
        return mode is Mode.PAUSED or (mode is Mode.RUNNING and idle)

    async def _until(self, reached: Callable[[Mode, str], bool]) -> None:
        """Wait until this is true for every engine in use."""
        async with asyncio.timeout(self._config.timeouts.control_s):
            while not all(reached(mode, name) for name, mode in self.modes().items()):
                await self.responses.changed()

    # --- lifetime ------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the fleet and begin to deliver; :meth:`close` follows also if this fails.

        Raises:
            EngineError: if an engine cannot be used.
            ConfigError: if the engines cannot be used together.
        """
        await self._closing.enter_async_context(self._rollouts)
        first = self.fleet.engines[0]
        if isinstance(first, SGLangEngine):
            self.model_path = first.facts.model_path
            self._labels[self._rollouts.version] = first.facts.label
        self._delivering = asyncio.create_task(self._deliver(), name="aprilsched gateway")

    async def drain(self) -> None:
        """Take no new requests, and let the open responses end.

        A response that is still open after `drain_s` ends as aborted with its tokens.
        """
        self.draining = True
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await self.responses.all_read()
        except TimeoutError:
            self.responses.abort_all()

    async def close(self) -> None:
        """End the scheduler, and close the fleet."""
        self.draining = True
        if self._delivering is not None:
            self._delivering.cancel()
            await asyncio.wait([self._delivering])
            self._delivering = None
        await self._closing.aclose()

    async def wait_failed(self) -> AprilschedError:
        """Wait until the scheduler has ended by itself, because the fleet is lost; returns why."""
        await self._failed.wait()
        if self._failure is None:
            raise InvariantViolation("a gateway has failed without a cause")
        return self._failure

    async def _deliver(self) -> None:
        """Take every rollout as soon as it is complete, until the scheduler ends."""
        waits = False
        while True:
            try:
                batch = await self._rollouts.next_batch()
            except RefitError as error:
                # No engine can generate before the next update, for which the requests wait.
                if not waits:
                    log.error("the gateway waits for new weights: %s", error)
                waits = True
                await asyncio.sleep(_AGAIN_S)
                continue
            except AprilschedError as error:
                self.draining = True
                self.responses.fail_all(str(error))
                self._failure = error
                self._failed.set()
                return
            waits = False
            for group in batch.groups:
                self.responses.deliver(group.group_id, group.rollouts[0])


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
"""The key under which the handlers find their service in the application."""
