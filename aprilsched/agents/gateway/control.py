"""The control calls of a gateway: pauses, and weights from a folder or in calls.

Invariants:
- A pause lasts until the continue call, whatever updates come in between.
- Control calls run one at a time, in their order of arrival, and run to completion even if the
  client disconnects: otherwise a half-applied call would never be undone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aprilsched.agents.gateway.labels import Labels
from aprilsched.agents.gateway.responses import Responses
from aprilsched.agents.gateway.updates import (
    Bucket,
    FromCalls,
    FromDisk,
    broadcast,
    handles,
    join_group,
    leave_group,
    stamp_of,
)
from aprilsched.agents.serving.calls import BroadcastBody, DiskBody, JoinBody, PauseMode, TensorBody
from aprilsched.agents.serving.refusals import Unavailable
from aprilsched.errors import ConfigError, RefitError
from aprilsched.kernel.core.state.engine_control import Mode
from aprilsched.kernel.core.steps.outage import stranded
from aprilsched.kernel.engines.base import BeginsWithout, Engine, Fleet
from aprilsched.kernel.shell.refits import RefitReport
from aprilsched.kernel.shell.rollouts import RolloutScheduler
from aprilsched.kernel.weights.external import ExternalWeights
from aprilsched.kernel.weights.publisher import WeightPublisher

T = TypeVar("T")

_MAX_WAITING_CALLS = 64
"""Control calls that may wait for their turn. They stay queued if their clients disconnect, so
nothing else bounds their number, and each may have a body of many megabytes."""


@dataclass
class _Open:
    """An update whose weights come in calls."""

    version: int
    weights: FromCalls
    task: asyncio.Task[RefitReport]
    label: str | None = None
    is_announced: bool = False
    """Whether the client started the update by a call, and will end it by one."""


class ControlCalls:
    """Clients' control calls; run each of them with :meth:`carry_out`.

    Args:
        scheduler: the scheduler of the gateway.
        fleet: its engines.
        responses: the open responses.
        labels: the labels of versions.
        is_stored: whether a store keeps responses until their clients have read them.
        within_s: seconds for a pause, and for its end.

    Attributes:
        held: whether a client has paused the fleet.
        model_path: the folder of the weights that were loaded last.
    """

    def __init__(
        self,
        scheduler: RolloutScheduler,
        fleet: Fleet,
        responses: Responses,
        labels: Labels,
        *,
        is_stored: bool,
        within_s: float,
    ) -> None:
        self.held = False
        self.model_path = ""
        self._scheduler = scheduler
        self._fleet = fleet
        self._responses = responses
        self._labels = labels
        self._acknowledges = not is_stored
        self._within_s = within_s
        self._turn = asyncio.Lock()
        self._calls: set[asyncio.Task[Any]] = set()
        """Control calls that run or wait."""
        self._open: _Open | None = None
        """The update whose weights come in calls; None if none is open."""
        self._unnamed: int | None = None
        """The version of an update that ended without a label; the label may follow."""

    async def carry_out(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a control call in its turn and to completion, even if its client disconnects.

        Raises:
            Unavailable: if too many calls wait.
        """
        if len(self._calls) >= _MAX_WAITING_CALLS:
            call.close()
            raise Unavailable(
                f"{_MAX_WAITING_CALLS} control calls wait for their turn; try again later."
            )

        async def alone() -> T:
            try:
                async with self._turn:
                    return await call
            finally:
                call.close()  # Its turn may never have come.

        task = asyncio.create_task(alone(), name="aprilsched control call")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(_retrieve_error)
        return await asyncio.shield(task)

    # The engines, as the calls and /server_info see them.

    @property
    def names(self) -> list[str]:
        """Names of all engines, including those that have not answered yet."""
        awaited = self._fleet.awaited if isinstance(self._fleet, BeginsWithout) else ()
        return [*(engine.name for engine in self._fleet.engines), *awaited]

    @property
    def takers(self) -> Sequence[Engine]:
        """The engines that take new weights, in the order of the fleet.

        These are the engines of the open update; without one, the engines that answer.
        """
        if self._is_open and self._open is not None and self._open.weights.engines:
            return self._open.weights.engines
        names = {control.name for control in self._scheduler.state.fleet.control.all()}
        return [engine for engine in self._fleet.engines if engine.name in names]

    def mode_of(self, engine: str) -> str:
        """Return an engine's mode.

        This is its mode while it is in use, "standby" if it waits for the next update, and "lost"
        if it does not answer.
        """
        control = self._scheduler.state.fleet.control
        if engine in control.standby:
            return "standby"
        return "lost" if (found := control.of(engine)) is None else found.mode.value

    @property
    def _is_open(self) -> bool:
        return self._open is not None and not self._open.task.done()

    def _not_updated(self, failed: Iterable[str] = ()) -> str:
        """Return the names of the engines that an update has not reached, joined by commas.

        These have `failed` or were lost before. Empty if the update has reached all.
        """
        lost = {name for name in self.names if self.mode_of(name) == "lost"}
        return ", ".join(sorted(lost.union(failed)))

    @property
    def stranded_cause(self) -> str | None:
        """Why nothing can be generated before a client updates the weights; None if it can."""
        state = self._scheduler.state
        if not stranded(state):
            return None
        return (
            f'No server has the weights "{self._labels[state.weights.versions.trainer]}" '
            f"({', '.join(state.fleet.control.standby)} on standby); send "
            "/update_weights_from_disk with a folder that every server can read, or "
            "/update_weight_version if the servers were started with the weights to use."
        )

    def _check_servers(self) -> None:
        """Refuse a call that would wait for a server.

        Raises:
            Unavailable: if no server answers.
        """
        if not any(self._scheduler.state.fleet.control.all()):
            raise Unavailable("No server answers, so nothing was done; send the call again later.")

    async def abort(self, rid: str) -> None:
        """End a response; see :meth:`Responses.abort`."""
        self._responses.abort(rid)

    async def abort_group(self, name: str) -> None:
        """End the responses of a group; see :meth:`Responses.abort_group`."""
        self._responses.abort_group(name)

    async def abort_all(self) -> None:
        """End every response."""
        self._responses.abort_all()

    # Pauses.

    @property
    def idle(self) -> list[str]:
        """Names of the engines that a pause leaves running, because they have no requests."""
        engines = self._scheduler.state.fleet.control.engines
        return [name for name, control in engines.items() if control.mode is Mode.RUNNING]

    def pause(self, mode: PauseMode) -> Coroutine[Any, Any, None]:
        """Pause the fleet; the call returns when every engine in use is paused.

        The mode "abort" ends every request at once. In the other modes, requests wait inside the
        engines according to the gateway's straggler rule.

        Raises:
            TimeoutError: if an engine is not paused in time. The pause still holds.
            Unavailable: if no server answers.
        """
        if mode == "abort":
            self._responses.abort_all()
        return self._pause()

    async def _pause(self) -> None:
        self._check_servers()
        await self._hold()

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
        if (cause := self.stranded_cause) is not None:
            raise RefitError(cause)

    async def flush(self) -> bool:
        """Drop the cached KV of all engines; returns False while requests run."""
        if self._is_open:
            return True  # The update has flushed them, and nothing runs in it.
        in_flight = self._scheduler.state.in_flight
        if not self.held and in_flight.open_attempts + len(in_flight.queue):
            return False
        if not self.held and self._responses.to_launch:
            return False
        held = self.held
        await self._hold()
        try:
            names = self._scheduler.state.fleet.control.engines
            engines = [engine for engine in self._fleet.engines if engine.name in names]
            await asyncio.gather(*(engine.flush() for engine in engines))
        finally:
            if not held:
                await self._end_hold()
        return True

    async def _hold(self) -> None:
        self.held = True
        self._scheduler.hold(held=True)
        await self._until(self._is_still)

    async def _end_hold(self) -> None:
        self.held = False
        self._scheduler.hold(held=False)
        # A running engine is asked for its version before it gets its first request.
        await self._until(lambda mode, _: mode in (Mode.RUNNING, Mode.VERIFYING))

    def _is_still(self, mode: Mode, engine: str) -> bool:
        # The scheduler does not pause an idle engine; it only sends it nothing.
        idle = not self._scheduler.state.in_flight.open[engine]
        loading = mode is Mode.REFITTING and self._open is not None
        return mode is Mode.PAUSED or loading or (mode is Mode.RUNNING and idle)

    async def _until(self, reached: Callable[[Mode, str], bool]) -> None:
        """Wait until this is true for every engine in use."""
        async with asyncio.timeout(self._within_s):
            engines = self._scheduler.state.fleet.control.engines
            while not all(reached(control.mode, name) for name, control in engines.items()):
                await self._responses.changed()

    # Weights. Each call returns the names of the engines that are out of use until a later update
    # reaches them.

    async def load(self, body: DiskBody) -> str:
        """Load the weights in a directory into every engine, and label them.

        The scheduler pauses, flushes and continues the engines unless the client has paused them;
        `flush_cache` is ignored.

        Raises:
            ConfigError: if the label cannot be used, or if weights are coming in calls.
            RefitError: if no engine has loaded them.
        """
        if self._is_open:
            raise ConfigError(
                "Another update is open, whose weights come in calls; end it with "
                "/update_weight_version or /continue_generation."
            )
        stamp = await asyncio.to_thread(stamp_of, body.model_path)
        report = await self._update(
            FromDisk(self._labels), body.weight_version, body.model_path, stamp
        )
        self.model_path = body.model_path
        return self._not_updated(report.quarantined)

    async def relabel(self, label: str) -> str:
        """Set the label of the newest weights.

        This ends an update whose weights came in calls, or labels one that ended without a label.
        Otherwise it adopts weights that were loaded into the engines directly.

        Raises:
            ConfigError: if the label cannot be used.
            RefitError: if no engine takes the label.
        """
        Labels.check(label)
        report = await self._end_open(label)
        if report is None and self._scheduler.version == self._unnamed:
            self._unnamed = None
            await self._name(self._scheduler.version, label)
            return self._not_updated()
        if report is None:
            report = await self._update(ExternalWeights(label=True), label)
        return self._not_updated(report.quarantined)

    async def begin_update(self) -> None:
        """Start an update whose weights come in calls, unless one is open.

        Raises:
            RefitError: if the update ends before the engines take any weights.
        """
        opened = self._open_update()
        opened.is_announced = True
        await opened.weights.ready()

    async def take_tensors(self, body: TensorBody) -> str:
        """Pass a bucket on to all engines; the first one starts the update.

        The label of the last bucket names the weights. A bucket that flushes is the last, unless
        the client has paused the gateway or will end the update by a call.

        Raises:
            ConfigError: if the label or the bucket cannot be used.
            RefitError: if no engine takes the weights.
        """
        return await self._take(
            handles(body.serialized_named_tensors, self.takers, body.load_format), body
        )

    async def take_broadcast(self, body: BroadcastBody) -> str:
        """Let all engines receive a bucket; as :meth:`take_tensors`."""
        return await self._take(broadcast(body), body)

    async def _take(self, bucket: Bucket, body: TensorBody | BroadcastBody) -> str:
        if body.weight_version is not None:
            Labels.check(body.weight_version)
        opened = self._open_update()
        failed = await opened.weights.pass_on(bucket)
        opened.label = opened.label if body.weight_version is None else body.weight_version
        if body.flush_cache and not self.held and not opened.is_announced:
            report = await self._end_open(None)
            return self._not_updated(failed if report is None else report.quarantined)
        return self._not_updated(failed)

    async def end_update(self) -> None:
        """Mark the weights as complete. If the client has paused the fleet, the update ends with
        its label or with the pause.

        Raises:
            ConfigError: if no update is open.
            RefitError: if no engine has taken the weights.
        """
        if self._open is None:
            raise ConfigError("No update is open; start one first.")
        if not self.held:
            await self._end_open(None)

    async def join_group(self, body: JoinBody) -> None:
        """Let all engines that answer join a group of the client."""
        await join_group(body, self.takers)

    async def leave_group(self, name: str) -> None:
        """Let all engines leave a group of the client."""
        await leave_group(name, self._fleet.engines)

    def _open_update(self) -> _Open:
        """Return the open update, or start one."""
        if self._open is None or self._open.task.done():
            self._check_servers()
            version, weights = self._scheduler.version + 1, FromCalls()
            task = asyncio.create_task(
                self._scheduler.update_weights(
                    weights, version=version, acknowledge=self._acknowledges
                ),
                name="aprilsched update",
            )
            # The call that ends the update gets its error; there may be no such call.
            task.add_done_callback(_retrieve_error)
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
        return await self._explained(asyncio.shield(opened.task))

    async def _update(
        self, publisher: WeightPublisher, label: str | None, folder: str = "", stamp: str = ""
    ) -> RefitReport:
        self._check_servers()
        version = self._scheduler.version + 1
        await self._name(version, label, folder, stamp)
        # With a store, a response is kept until its client has read it, whatever loads before that.
        return await self._explained(
            self._scheduler.update_weights(
                publisher, version=version, acknowledge=self._acknowledges
            )
        )

    async def _explained(self, update: Awaitable[RefitReport]) -> RefitReport:
        """Wait for an update; if it leaves no engine usable, the error names the next call."""
        try:
            return await update
        except RefitError as error:
            if (cause := self.stranded_cause) is None:
                raise
            raise RefitError(f"{error} {cause}") from error

    async def _name(
        self, version: int, label: str | None, folder: str = "", stamp: str = ""
    ) -> None:
        """Label a version before it is loaded, because its tokens may arrive at once."""
        if label is not None:
            Labels.check(label)
        label = str(version) if label is None else label
        await asyncio.to_thread(self._labels.name, version, label, folder, stamp)

    async def close(self) -> None:
        """Cancel the open calls and the open update, so that partial weights are never in use."""
        await cancel_all(self._calls)
        if self._open is not None:
            await cancel_all([self._open.task])
            self._open = None


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait for their ends."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    """Mark the error of a task as retrieved, so that asyncio does not warn."""
    if not task.cancelled():
        task.exception()
