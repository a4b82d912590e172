"""The scheduler behind a gateway: what a handler asks of it, and what it delivers.

Invariants:
- Every response that a client waits for ends: with its rollout, with an abort, or with a cause.
- A pause lasts until the continue, whatever updates come in between.
- Control calls are carried out one at a time, in the order in which they came.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from types import CoroutineType
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec
from aiohttp import web

from aprilsched import __version__
from aprilsched.chat.tokenizer import Texts
from aprilsched.coordinator.prompts import PromptQueue, checked
from aprilsched.coordinator.refits import RefitReport
from aprilsched.coordinator.rollouts import RolloutScheduler
from aprilsched.core.config import SchedulerConfig
from aprilsched.core.messages import events as ev
from aprilsched.core.state.engine_control import Mode
from aprilsched.dialects.sglang import PromptsBody
from aprilsched.engines.base import BeginsWithout, Engine, Fleet
from aprilsched.engines.server import facts_of
from aprilsched.errors import (
    AprilschedError,
    ConfigError,
    RefitError,
    StoreError,
)
from aprilsched.files import read_regular, written_whole
from aprilsched.gateway.responses import Asked, Response, Responses
from aprilsched.gateway.settings import GatewaySettings, for_clients
from aprilsched.gateway.updates import (
    Bucket,
    FromCalls,
    FromDisk,
    broadcast,
    handles,
    join_group,
    leave_group,
    ranks_of,
)
from aprilsched.serving.calls import BroadcastBody, DiskBody, JoinBody, PauseMode, TensorBody
from aprilsched.serving.refusals import Refused, Unavailable
from aprilsched.store.codec import check_storable
from aprilsched.store.sqlite import SqliteStore
from aprilsched.telemetry.base import AnyListener
from aprilsched.telemetry.metrics import Metrics
from aprilsched.telemetry.table import Clients
from aprilsched.weights.external import ExternalWeights
from aprilsched.weights.publisher import WeightPublisher

log = logging.getLogger("aprilsched")

_UNAVAILABLE = 503
_REASONS = {400: "invalid", 401: "key", 404: "unknown", 405: "unknown", 413: "large", 503: "busy"}
"""Why requests are refused, by the HTTP status of the answer, as the metrics have it."""
_STOPPED = "The gateway stops; send the same rid again to go on with this response."
_ENDED = "The gateway stops; send the prompt with these tokens elsewhere to go on."
_STRANDED = (
    "Nothing is generated until an update succeeds, because no server surely has complete weights; "
    "send /update_weights_from_disk with a folder that every server can read, or weights in parts."
)
_MOST_CALLS = 64
"""Control calls that may wait for their turn. They stay when their clients leave, so nothing else
bounds their number, and each may have a body of many megabytes."""
_AGAIN_S = 1.0
"""Seconds after which a batch is asked for again that no engine can generate before an update."""


class _Rollouts(RolloutScheduler):
    """The scheduler with the three events that a gateway has beside those of a trainer."""

    def hold(self, *, held: bool) -> None:
        """Pause the engines with the requests inside them, or let them generate again."""
        self._feed(ev.HoldChanged(held=held))

    @property
    def store_error(self) -> str | None:
        """Why the store does not save the run at present; None while it does."""
        return self._session.durability.error

    def withdraw(self, group_id: int, cause: str) -> None:
        """Drop a group that nobody wants any more."""
        self._feed(ev.GroupWithdrawn(group_id=group_id, cause=cause))


P = ParamSpec("P")
T = TypeVar("T")


def _in_turn(
    call: Callable[Concatenate[Service, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Service, P], CoroutineType[Any, Any, T]]:
    """Carry a control call out to its end, also if the client that waits for it leaves: what was
    done halfway would be undone by nobody. Others wait for their turn."""

    @wraps(call)
    async def queued(self: Service, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.to_its_end(call(self, *args, **kwargs))

    return queued


@dataclass
class _Open:
    """An update whose weights come in calls."""

    version: int
    weights: FromCalls
    task: asyncio.Task[RefitReport]
    label: str | None = None
    begun: bool = False
    """Whether the client has said that it begins, and will say that it ends."""


class UnknownModel(Refused):
    """A request names a model that is not served."""

    status = 404


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

    generate_body = PromptsBody

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
        self.clients = Clients(responses=lambda: len(self.responses))
        self.metrics = Metrics(clients=self.clients)
        self.responses = Responses(
            withdraw=self._withdraw,
            state=lambda: self._rollouts.state,
            first_token=partial(self.metrics.observe, "gateway/first_token_seconds"),
        )
        self.random_seed = secrets.randbelow(2**31)
        """Distinguishes this process from a later one at its address, as a server's seed does."""
        self.held = False
        """Whether a client has paused the fleet."""
        self.draining = False
        """Whether no new requests are taken, because the gateway stops."""
        self.model_path = ""
        self.texts = Texts(settings.tokenizer, settings.response_template)
        self._prompts = PromptQueue(together_s=0)
        store = settings.store
        self._stored = store is not None
        self._labels = Labels(None if store is None else Path(f"{store}-labels.json"))
        self._config = for_clients(config, settings)
        self._rollouts = _Rollouts(
            fleet,
            self._prompts,
            config=self._config,
            listeners=[self.responses, self.metrics, *listeners],
            store=None if store is None else SqliteStore(store),
        )
        # Clients get the label with each response, and know whether it is theirs.
        self._rollouts.trust_weights()
        self._control = asyncio.Lock()
        self._calls: set[asyncio.Task[Any]] = set()
        """Control calls that go on if their client leaves."""
        self._open: _Open | None = None
        """The update whose weights come in calls, while there is one."""
        self._unnamed: int | None = None
        """The version of an update that ended without a label, which may follow."""
        self._delivering: asyncio.Task[None] | None = None
        self._expiring: asyncio.TimerHandle | None = None
        self._closing = AsyncExitStack()

    # --- what the handlers ask -----------------------------------------------------------------

    @property
    def label(self) -> str:
        """The label of the fleet's weights, as the client that loaded them has named it."""
        return self.label_of(self._rollouts.version)

    def label_of(self, version: int) -> str:
        """The label of a version; a version that no client has named is a decimal number."""
        return self._labels[version]

    @property
    def ready(self) -> bool:
        """Whether a request would be generated now."""
        return bool(self.in_use) and not self.draining and not self.held

    async def alive(self) -> bool:
        """Whether the scheduler runs, also while it waits for an engine or stops."""
        return not self._failed.done()

    async def healthy(self) -> bool:
        """Whether an engine is in use, and the gateway does not stop. Nothing is generated for it,
        so it is also told during a pause."""
        return bool(self.in_use) and not self.draining

    @property
    def retry_s(self) -> int:
        """Seconds after which a client that was refused may ask again: when the open responses have
        ended, or soon."""
        return math.ceil(max(1, self.settings.drain_s if self.draining else 1))

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.settings.served_model_name or self.model_path

    def check_model(self, name: str) -> None:
        """Refuse the name of another model, where the operator has named the one that is served.

        Raises:
            UnknownModel: if it is another one.
        """
        known = self.settings.served_model_name
        if known is not None and name not in ("", known):
            raise UnknownModel(f"The model {name} is not served here; ask for {known}.")

    @property
    def in_use(self) -> list[str]:
        """Names of the engines that are in use."""
        return list(self._rollouts.state.fleet.control.engines)

    @property
    def takers(self) -> Sequence[Engine]:
        """The engines that new weights are for, in the order of the fleet: those that answer, or
        those that the open update began with."""
        if self._open is not None and not self._open.task.done() and self._open.weights.engines:
            return self._open.weights.engines
        names = {control.name for control in self._rollouts.state.fleet.control.all()}
        return [engine for engine in self.fleet.engines if engine.name in names]

    @property
    def _names(self) -> list[str]:
        """Names of all engines, also of those that have not answered yet."""
        awaited = self.fleet.awaited if isinstance(self.fleet, BeginsWithout) else ()
        return [*(engine.name for engine in self.fleet.engines), *awaited]

    def mode_of(self, engine: str) -> str:
        """What an engine does: its mode while it is in use, "standby" if it waits for the next
        update, and "lost" if it does not answer."""
        control = self._rollouts.state.fleet.control
        if engine in control.standby:
            return "standby"
        return "lost" if (found := control.of(engine)) is None else found.mode.value

    def _not_updated(self, failed: Iterable[str]) -> str:
        """The end of a sentence that names the engines which an update has not reached: those that
        have `failed`, and those that were lost before. Empty if it has reached all."""
        lost = {name for name in self._names if self.mode_of(name) == "lost"}
        missed = ", ".join(sorted(lost.union(failed)))
        return f" Not updated, and out of use: {missed}." if missed else ""

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

    def model_facts(self) -> dict[str, Any]:
        """The name of the model; the engines know more of it than the gateway does."""
        return {"served_model_name": self.model_name}

    def server_facts(self) -> dict[str, Any]:
        """What a client of SGLang looks up, and the engines under ``gateway``.

        A group for weights needs a rank for each rank of all engines, so `tp_size` is their number.
        """
        saved = (self._rollouts.store_error or "saved") if self._stored else None
        # The oldest release among the engines, whose answers those of the gateway resemble.
        found = [re.findall(r"\d+", each.capabilities.server)[:3] for each in self.fleet.engines]
        return {
            "skip_tokenizer_init": not self.texts.there,
            "tp_size": ranks_of(self.takers) or 1,
            "enable_lora": False,
            # The KV of its engines is its own matter.
            "enable_hierarchical_cache": False,
            **self._room(),
            "random_seed": self.random_seed,
            "version": ".".join(min(found, key=lambda parts: [int(part) for part in parts])),
            "gateway": {
                "aprilsched": __version__,
                "engines": [{"name": name, "mode": self.mode_of(name)} for name in self._names],
                "store": saved,
            },
        }

    def rank_loads(self) -> dict[str, Any]:
        """The requests of the gateway, as those of one server."""
        return {
            "timestamp": time.time(),
            "num_running_reqs": self.running(),
            "num_waiting_reqs": self.waiting(),
            **self._room(),
        }

    def _room(self) -> dict[str, int]:
        """Running requests and tokens of KV that fit on all engines which tell it."""
        found = [engine.capabilities for engine in self.fleet.engines]
        return {
            "max_running_requests": sum(each.max_running_requests or 0 for each in found),
            "max_total_num_tokens": sum(each.kv_tokens or 0 for each in found),
        }

    @property
    def vocab_size(self) -> int | None:
        """Smallest number of token ids among the engines that tell it."""
        told = filter(None, map(facts_of, self.fleet.engines))
        return min((f.vocab_size for f in told if f.vocab_size is not None), default=None)

    @property
    def context_tokens(self) -> int | None:
        """Tokens of a prompt and its response together that every engine has room for; None if
        nobody tells."""
        told = filter(None, map(facts_of, self.fleet.engines))
        known = (f.context_tokens for f in told if f.context_tokens is not None)
        return self.texts.context(min(known, default=None))

    # --- responses -----------------------------------------------------------------------------

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error of this HTTP status."""
        reason = "stopping" if status == _UNAVAILABLE and self.draining else _REASONS.get(status)
        self.clients.refusals[reason or "failed"] += 1

    def ask(self, *asked: Asked) -> list[Response]:
        """Begin responses, or go on with those of the prior process that have the same names.

        Either all of them begin or none does.

        Raises:
            ConfigError: if a prompt or a name cannot be used.
        """
        for ask in asked:
            checked(ask.prompt, 1, companions=self._config.policies.companions)
            if self._stored:
                check_storable(replace(ask.prompt, key=ask.rid))
        responses, prompts = self.responses.open(asked)
        if prompts:
            self._prompts.put(*prompts)
        return responses

    def _withdraw(self, group_id: int, cause: str) -> None:
        self._rollouts.withdraw(group_id, cause)

    async def abort(self, rid: str) -> None:
        """End a response; see :meth:`Responses.abort`."""
        self.responses.abort(rid)

    async def abort_group(self, name: str) -> None:
        """End the responses of a group; see :meth:`Responses.abort_group`."""
        self.responses.abort_group(name)

    async def abort_all(self) -> None:
        """End every response."""
        self.responses.abort_all()

    # --- control calls -------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Pause the fleet; returns when every engine in use is paused. The mode "abort" ends every
        request; after the others the requests wait inside the engines, as the gateway's own
        straggler rule says.

        Raises:
            TimeoutError: if an engine is not paused in time. The pause still holds.
        """
        if mode == "abort":
            self.responses.abort_all()
        await self.to_its_end(self._hold())

    @_in_turn
    async def resume(self) -> None:
        """End the pause; returns when every engine in use generates again.

        Raises:
            TimeoutError: if an engine does not continue in time.
            RefitError: if weights that came in calls reached no engine, or if no engine can
                generate before an update succeeds.
        """
        try:
            await self._end_open(None)
        finally:
            await self._end_hold()
        if self._stranded:
            raise RefitError(_STRANDED)

    @_in_turn
    async def flush(self) -> bool:
        """Drop the cached KV of all engines; returns False while requests run."""
        if self._open is not None and not self._open.task.done():
            return True  # The update has flushed them, and nothing runs in it.
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

    @_in_turn
    async def load(self, body: DiskBody) -> str:
        """Load the weights in a directory into every engine, and label them. The scheduler pauses,
        flushes and continues the engines where the client has not; `flush_cache` is ignored.

        Returns:
            The engines that are out of use until a later update reaches them, in words.

        Raises:
            ConfigError: if the label cannot be used, or if weights are coming in calls.
            RefitError: if no engine has loaded them.
        """
        if self._open is not None and not self._open.task.done():
            raise ConfigError(
                "Another update is open, whose weights come in calls; end it with "
                "/update_weight_version or /continue_generation."
            )
        report = await self._update(FromDisk(body.model_path), body.weight_version)
        self.model_path = body.model_path
        return self._not_updated(report.quarantined)

    @_in_turn
    async def relabel(self, label: str) -> str:
        """End an update whose weights came in calls, or name the one that has ended without a
        label, or else take the weights that somebody has loaded into the engines already.

        Returns:
            What :meth:`load` returns.

        Raises:
            ConfigError: if the label cannot be used.
            RefitError: if no engine takes the label.
        """
        Labels.check(label)
        report = await self._end_open(label)
        if report is None and self._rollouts.version == self._unnamed:
            self._unnamed = None
            await self._name(self._rollouts.version, label)
            return self._not_updated(())
        if report is None:
            report = await self._update(ExternalWeights(label=True), label)
        return self._not_updated(report.quarantined)

    async def to_its_end(self, call: Coroutine[Any, Any, T]) -> T:
        """Carry a control call out in its turn; see :func:`_in_turn`.

        Raises:
            Unavailable: if too many wait for their turn.
        """
        if len(self._calls) >= _MOST_CALLS:
            call.close()
            raise Unavailable(f"{_MOST_CALLS} control calls wait for their turn; try again later.")

        async def alone() -> T:
            try:
                async with self._control:
                    return await call
            finally:
                call.close()  # Its turn may never have come.

        task = asyncio.create_task(alone(), name="aprilsched control call")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(_seen)
        return await asyncio.shield(task)

    async def _update(self, publisher: WeightPublisher, label: str | None) -> RefitReport:
        version = self._rollouts.version + 1
        await self._name(version, label)
        # A store keeps a response until its client has read it, whatever is loaded meanwhile.
        return await self._told(
            self._rollouts.update_weights(publisher, version=version, acknowledge=not self._stored)
        )

    async def _told(self, update: Awaitable[RefitReport]) -> RefitReport:
        """What became of an update; its error says what a client has to send where nothing can be
        generated after it."""
        try:
            return await update
        except RefitError as error:
            if not self._stranded:
                raise
            raise RefitError(f"{error} {_STRANDED}") from error

    @property
    def _stranded(self) -> bool:
        """Whether servers answer, but none may generate before an update succeeds."""
        state = self._rollouts.state
        control = state.fleet.control
        return not control.engines and bool(control.standby) and state.weights.update is None

    async def _name(self, version: int, label: str | None) -> None:
        """Label a version, which is done before it is loaded: its tokens may arrive at once."""
        if label is not None:
            Labels.check(label)
        await asyncio.to_thread(
            self._labels.name, version, str(version) if label is None else label
        )

    # --- weights that come in calls ------------------------------------------------------------

    @_in_turn
    async def begin_update(self) -> None:
        """Begin an update whose weights come in calls, unless one is open.

        Raises:
            RefitError: if the update ends before the engines take any weights.
        """
        opened = self._open_update()
        opened.begun = True
        await opened.weights.ready()

    @_in_turn
    async def take_tensors(self, body: TensorBody) -> str:
        """Pass a bucket on to all engines; the first begins the update. The label that came with
        the last one names the weights. A bucket that flushes is the last, unless the client has
        paused the gateway or has said that it will say so.

        Returns:
            What :meth:`load` returns.

        Raises:
            ConfigError: if the label or the bucket cannot be used.
            RefitError: if no engine takes the weights.
        """
        return await self._take(
            handles(body.serialized_named_tensors, self.takers, body.load_format), body
        )

    @_in_turn
    async def take_broadcast(self, body: BroadcastBody) -> str:
        """Let all engines receive a bucket; as :meth:`take_tensors`."""
        return await self._take(broadcast(body), body)

    async def _take(self, bucket: Bucket, body: TensorBody | BroadcastBody) -> str:
        if body.weight_version is not None:
            Labels.check(body.weight_version)
        opened = self._open_update()
        failed = await opened.weights.pass_on(bucket)
        opened.label = opened.label if body.weight_version is None else body.weight_version
        if body.flush_cache and not self.held and not opened.begun:
            report = await self._end_open(None)
            return self._not_updated(failed if report is None else report.quarantined)
        return self._not_updated(failed)

    @_in_turn
    async def end_update(self) -> None:
        """Say that all weights are there. In a pause of the client the update ends with its label
        or with the pause.

        Raises:
            ConfigError: if no update is open.
            RefitError: if no engine has taken the weights.
        """
        if self._open is None:
            raise ConfigError("No update is open; begin one first.")
        if not self.held:
            await self._end_open(None)

    @_in_turn
    async def join_group(self, body: JoinBody) -> None:
        """Let all engines that answer join a group of the client."""
        await join_group(body, self.takers)

    @_in_turn
    async def leave_group(self, name: str) -> None:
        """Let all engines leave a group of the client."""
        await leave_group(name, self.fleet.engines)

    def _open_update(self) -> _Open:
        """The open update; begins one if there is none."""
        if self._open is None or self._open.task.done():
            version, weights = self._rollouts.version + 1, FromCalls()
            task = asyncio.create_task(
                self._rollouts.update_weights(
                    weights, version=version, acknowledge=not self._stored
                ),
                name="aprilsched update",
            )
            # Whoever ends the update gets its error, and perhaps nobody does.
            task.add_done_callback(_seen)
            self._open = _Open(version=version, weights=weights, task=task)
        return self._open

    async def _end_open(self, label: str | None) -> RefitReport | None:
        """End the open update; None if there is none."""
        opened, self._open = self._open, None
        if opened is None:
            return None
        if not opened.task.done():
            if label is None and opened.label is None:
                self._unnamed = opened.version
            await self._name(opened.version, label or opened.label)
            opened.weights.end()
        return await self._told(asyncio.shield(opened.task))

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
        loading = mode is Mode.REFITTING and self._open is not None
        return mode is Mode.PAUSED or loading or (mode is Mode.RUNNING and idle)

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
            ConfigError: if the engines cannot be used together, or if the store is a trainer's.
            StoreError: if the store cannot be used.
        """
        self._labels.open()
        self._failed: asyncio.Future[AprilschedError] = asyncio.get_running_loop().create_future()
        await self._closing.enter_async_context(self._rollouts)
        for batch in self._rollouts.state.delivery.redelivery:
            # Now, and not when it is delivered: its client may ask for it at once.
            self.responses.restore(batch)
        if self.responses.foreign:
            raise ConfigError(
                f"{self.settings.store} has the run of a trainer; give the gateway a store of its "
                "own."
            )
        first = facts_of(self.fleet.engines[0])
        if first is not None:
            self.model_path = first.model_path
            if self._rollouts.version not in self._labels:
                self._labels.name(self._rollouts.version, first.label)
        await self.texts.open(self.model_path)
        if self._stored:
            loop = asyncio.get_running_loop()
            self._expiring = loop.call_later(self.settings.reclaim_s, self._expire)
        self._delivering = asyncio.create_task(self._deliver(), name="aprilsched gateway")

    async def drain(self) -> None:
        """Take no new requests, and let the open responses end.

        A response that is still open after `drain_s` ends as aborted with its tokens and the
        reason, or, with a store, without a result.
        """
        self.draining = True
        try:
            async with asyncio.timeout(self.settings.drain_s):
                await self.responses.all_read()
        except TimeoutError:
            if self._stored:
                self.responses.interrupt_all(_STOPPED)
            else:
                self.responses.end_all(_ENDED)

    def _expire(self) -> None:
        self.responses.expire(
            f"nobody asked for it within {self.settings.reclaim_s:g} s after the restart"
        )

    async def close(self) -> None:
        """End the scheduler, and close the fleet."""
        self.draining = True
        await _cancel_all(self._calls)
        if self._open is not None:
            # The trainer brings no more of these weights, and a half of them is never in use.
            await _cancel_all([self._open.task])
            self._open = None
        if self._expiring is not None:
            self._expiring.cancel()
        if self._delivering is not None:
            await _cancel_all([self._delivering])
            self._delivering = None
        await self._closing.aclose()

    async def wait_failed(self) -> AprilschedError:
        """Wait until the scheduler has ended by itself, because the fleet is lost; returns why."""
        return await asyncio.shield(self._failed)

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
                self._failed.set_result(error)
                return
            waits = False
            self.responses.deliver(batch)


async def _cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their ends."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def _seen(task: asyncio.Task[Any]) -> None:
    """Mark the error of a task as seen, so that asyncio does not warn."""
    if not task.cancelled():
        task.exception()


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
"""The key under which the handlers find their service in the application."""


# --- labels --------------------------------------------------------------------------------------

# The names that clients give to the versions of the weights.

_LONGEST = 256
_KEPT = 1000
"""Number of labels that are kept. A response that is older than so many updates shows numbers for
its oldest tokens."""


class Labels:
    """The label of each version, in memory and in a file.

    Args:
        path: the file; None keeps the labels in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._labels: dict[int, str] = {}

    def __getitem__(self, version: int) -> str:
        """The label of a version; a version without one is a decimal number."""
        return self._labels.get(version, str(version))

    def __contains__(self, version: int) -> bool:
        return version in self._labels

    def open(self) -> None:
        """Read the labels of the prior process, if there is a file.

        Raises:
            StoreError: if the file is damaged or cannot be read.
        """
        if self._path is None:
            return
        try:
            self._labels = msgspec.json.decode(read_regular(self._path), type=dict[int, str])
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            raise StoreError(
                f"The labels in {self._path} cannot be read ({error}); remove the file, and "
                "versions that were loaded before are shown as numbers."
            ) from error

    @staticmethod
    def check(label: str) -> None:
        """Refuse a label that cannot be used.

        Raises:
            ConfigError: if it is empty or longer than 256 characters.
        """
        if not 0 < len(label) <= _LONGEST:
            raise ConfigError(
                f"The label of the weights has {len(label)} characters; give 1 to {_LONGEST}."
            )

    def name(self, version: int, label: str) -> None:
        """Call `version` by `label` from now on.

        A file that cannot be written does not keep the new weights away; it is logged.
        """
        self._labels[version] = label
        for old in sorted(self._labels)[:-_KEPT]:
            del self._labels[old]
        if self._path is None:
            return
        try:
            with written_whole(self._path) as file:
                file.write(msgspec.json.encode(self._labels))
        except OSError as error:
            log.error("the label of version %d is not saved: %s", version, error)
