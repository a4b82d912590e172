"""The gateway from start to stop: the scheduler, the batches that it delivers, and the HTTP server.

Invariants:
- Every response that a client waits for ends: with its rollout, with an abort, or with a cause.
- A pause lasts until the continue, whatever updates come in between.
- Control calls are carried out one at a time, in the order in which they came.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, ClassVar

from aiohttp import web

from aprilsched.coordinator.prompt_queue import PromptQueue
from aprilsched.coordinator.prompts import checked
from aprilsched.coordinator.refits import RefitReport
from aprilsched.coordinator.rollouts import RolloutScheduler
from aprilsched.core.config import Dispatch, Retries, SchedulerConfig
from aprilsched.core.messages import events as ev
from aprilsched.core.policies.bounds import AT_LEAST_0, AT_LEAST_1, check_settings
from aprilsched.core.policies.refill import PoolView, Refill
from aprilsched.core.state.engine_control import Mode
from aprilsched.engines.base import Engine, Fleet
from aprilsched.engines.refit import RefitFromDisk
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.errors import AprilschedError, ConfigError, InvariantViolation, RefitError
from aprilsched.gateway.app import make_app
from aprilsched.gateway.responses import Response, Responses
from aprilsched.telemetry.base import AnyListener
from aprilsched.types import Prompt, Segment
from aprilsched.weights.base import WeightPublisher
from aprilsched.weights.external import ExternalWeights

__all__ = ["Gateway", "GatewaySettings", "OnDemand"]

log = logging.getLogger("aprilsched")

_AGAIN_S = 1.0
"""Seconds after which a batch is asked for again that no engine can generate before an update."""
_NEVER = 2**31 - 1
_LARGEST_PORT = 2**16 - 1
_CLOSE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDemand(Refill):
    """Starts every prompt that is there: the clients decide how many there are."""

    name: ClassVar[str] = "on_demand"

    limit: Annotated[int, AT_LEAST_1]
    """Largest number of rollouts in flight."""

    def launches(self, view: PoolView) -> int:
        return max(0, self.limit - view.in_flight)

    def told(self, ratio: str) -> str:
        return f"what clients ask for, at most {self.limit} rollouts at a time"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewaySettings:
    """How a gateway listens, and how much it takes on.

    Raises:
        ConfigError: if a value is out of its range.
    """

    host: str = "127.0.0.1"
    """Address to listen at; any address but loopback lets other machines connect."""
    port: int = 30000
    """Port to listen at; 0 for any free one."""
    max_requests: Annotated[int, AT_LEAST_1] = 4096
    """Largest number of open responses. A request beyond it is answered with 503 at once."""
    drain_s: Annotated[float, AT_LEAST_0] = 30.0
    """Seconds for which open responses may go on when the gateway stops. Those that are left then
    end as aborted, with their tokens."""

    def __post_init__(self) -> None:
        check_settings(self)
        if not 0 <= self.port <= _LARGEST_PORT:
            raise ConfigError(f"port is {self.port}; give one from 0 (any) to {_LARGEST_PORT}.")


class _Rollouts(RolloutScheduler):
    """The scheduler with the three events that a gateway has beside those of a trainer."""

    def hold(self, *, held: bool) -> None:
        """Pause the engines with the requests inside them, or let them generate again."""
        self._feed(ev.HoldRequested() if held else ev.HoldEnded())

    def withdraw(self, group_id: int, cause: str) -> None:
        """Drop a group that nobody wants any more."""
        self._feed(ev.GroupWithdrawn(group_id=group_id, cause=cause))


class _FromDisk:
    """Lets every engine load a directory, which the engines see and the gateway need not see."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    async def prepare(self, version: int) -> None:
        """Do nothing: the client has written the directory."""

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Load the directory into all engines, in parallel."""
        outcomes = await asyncio.gather(*(self._load(version, engine) for engine in engines))
        return {engine.name: outcome for engine, outcome in zip(engines, outcomes, strict=True)}

    async def _load(self, version: int, engine: Engine) -> Exception | None:
        if not isinstance(engine, RefitFromDisk):
            return ConfigError(f"{engine.name} does not load weights from a disk.")
        try:
            await engine.update_from_disk(self._path, version)
        except Exception as error:  # One engine's failure must not hide the others' results.
            return error
        return None


class Gateway:
    """One address in front of a fleet; an async context manager.

    A request is a rollout of a group of one, and the scheduler is that of any run: it sends the
    rollout to an engine, pauses and refits the engines for new weights, sends the rollout again
    with its tokens if its engine is lost, and enters what a client gives up into its ledger.

    Args:
        fleet: the engines; they are opened and closed with the gateway.
        settings: how it listens, and how much it takes on.
        config: settings of the scheduler; those for batches of a trainer are replaced.
        api_key: bearer token that every call but those for health needs; None leaves them open.
        admin_key: bearer token that control calls need; None asks for `api_key` there too.
        listeners: telemetry of the run behind the gateway.

    Raises:
        ConfigError: if a setting cannot work.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        settings: GatewaySettings | None = None,
        config: SchedulerConfig | None = None,
        api_key: str | None = None,
        admin_key: str | None = None,
        listeners: Sequence[AnyListener] = (),
    ) -> None:
        self.settings = settings or GatewaySettings()
        self.fleet = fleet
        self.responses = Responses(withdraw=self._withdraw, versions=self._versions)
        self.random_seed = secrets.randbelow(2**31)
        """Distinguishes this process from a later one at its address, as a server's seed does."""
        self.held = False
        """Whether a client has paused the fleet."""
        self.draining = False
        """Whether the gateway stops and takes no new requests."""
        self.model_path = ""
        self._failed = asyncio.Event()
        self._failure: AprilschedError | None = None
        """The error that has ended the scheduler, if one has."""
        self._prompts = PromptQueue(together_s=0)
        self._labels: dict[int, str] = {}
        self._config = _for_clients(config or SchedulerConfig(), self.settings.max_requests)
        self._rollouts = _Rollouts(
            fleet, self._prompts, config=self._config, listeners=[self.responses, *listeners]
        )
        self._keys = (api_key, admin_key)
        self._control = asyncio.Lock()
        self._delivering: asyncio.Task[None] | None = None
        self._runner: web.AppRunner | None = None
        self._bound: int | None = None
        self._closing = AsyncExitStack()

    @property
    def url(self) -> str:
        """The URL of the gateway; its port is known once the gateway is started."""
        host = self.settings.host
        port = self.settings.port if self._bound is None else self._bound
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

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
        report = await self._update(_FromDisk(path), label)
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

    async def start(self) -> None:
        """Open the fleet and listen.

        Raises:
            EngineError: if an engine cannot be used.
            ConfigError: if the engines or the address cannot be used.
        """
        try:
            await self._closing.enter_async_context(self._rollouts)
            first = self.fleet.engines[0]
            if isinstance(first, SGLangEngine):
                self.model_path = first.facts.model_path
                self._labels[self._rollouts.version] = first.facts.label
            self._delivering = asyncio.create_task(self._deliver(), name="aprilsched gateway")
            await self._listen()
        except BaseException:
            await self.stop()
            raise

    async def wait_failed(self) -> AprilschedError:
        """Wait until the scheduler has ended by itself, because the fleet is lost; returns why."""
        await self._failed.wait()
        if self._failure is None:
            raise InvariantViolation("a gateway has failed without a cause")
        return self._failure

    async def stop(self) -> None:
        """Take no new requests, let the open responses end, and close everything.

        A response that is still open after `drain_s` ends as aborted with its tokens.
        """
        self.draining = True
        if self._runner is not None:
            try:
                async with asyncio.timeout(self.settings.drain_s):
                    await self.responses.all_read()
            except TimeoutError:
                self.responses.abort_all()
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()
        if self._delivering is not None:
            self._delivering.cancel()
            await asyncio.wait([self._delivering])
            self._delivering = None
        await self._closing.aclose()
        self._bound = None

    async def __aenter__(self) -> Gateway:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

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

    async def _listen(self) -> None:
        api_key, admin_key = self._keys
        app = make_app(self, api_key=api_key, admin_key=admin_key)
        # A handler whose client leaves is cancelled, which withdraws its rollout.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=_CLOSE_S, access_log=None
        )
        host, port = self.settings.host, self.settings.port
        try:
            await self._runner.setup()
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise ConfigError(
                f"Cannot listen on {host}:{port} ({why}); give another host or port."
            ) from error
        self._bound = self._runner.addresses[0][1]


def _for_clients(config: SchedulerConfig, limit: int) -> SchedulerConfig:
    """`config` with the settings that follow from serving clients in the place of a trainer.

    Raises:
        ConfigError: if a setting cannot work behind a gateway.
    """
    if not config.behaviour.waits_inside:
        raise ConfigError(
            f'straggler="{config.straggler}" does not let requests wait inside a paused engine; a '
            'gateway needs "retract" or "in_place".'
        )
    if config.max_staleness is not None:
        raise ConfigError(
            "max_staleness bounds the batches of a trainer, and a gateway has none; leave it out, "
            "and look at weight_versions in the answers."
        )
    return SchedulerConfig(
        batch_groups=1,
        group_size=1,
        over_provision=1.0,
        refill=OnDemand(limit=limit),
        straggler=config.straggler,
        pace="asynchronous",
        # Complete rollouts wait for the end of an update, and must not hold new ones up.
        ready_batches=limit,
        kv_after_refit=config.kv_after_refit,
        follow_weights=config.follow_weights,
        dispatch=Dispatch(placement="prefix", max_in_flight=config.dispatch.max_in_flight),
        retries=Retries(
            attempts=config.retries.attempts,
            interruptions=config.retries.interruptions,
            # A client whose requests are refused must not end the service for the others.
            failed_groups=_NEVER,
        ),
        health=config.health,
        timeouts=config.timeouts,
        allow_inexact_versions=config.allow_inexact_versions,
    )
