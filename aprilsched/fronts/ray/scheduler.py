"""The scheduler as a named Ray actor, and what a trainer on any node has of it.

::

    def make(servers, prompts, store):
        return aprilsched.RolloutScheduler(
            RayFleet(servers), read_prompts(prompts), store=SqliteStore(store)
        )

    start_scheduler("rollouts", partial(make, servers, "prompts.jsonl", "/shared/rollouts.store"))

    with RolloutScheduler("rollouts") as rollouts:  # in the trainer, on any node
        for batch in rollouts:
            trainer.step(batch.to_torch())
            trainer.save_pretrained(folder)
            rollouts.update_weights(DiskPublisher(folder))

Batches come through Ray's object store: their arrays are read-only views of its memory.

Ray restarts the actor when it dies, and repeats the requests in flight. Each request states what
its trainer has, so the first one can open the scheduler from its store, which delivers the other
batches again.

Invariants:

- One trainer is attached at a time. The latest one wins, and the others get SchedulerClosed.
- A batch that a trainer's call has returned is not returned by it again, and one that was
  acknowledged is never delivered again.
- After an update that a death has cut short, no engine generates before the update was repeated:
  an engine may have parts of two versions under the label of one.
"""

from __future__ import annotations

import asyncio
import gc
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from aprilsched.errors import (
    AprilschedError,
    ConfigError,
    EngineError,
    RefitError,
    SchedulerClosed,
    StoreError,
)
from aprilsched.fronts.process import (
    NOTICES,
    PING,
    BlockingRemote,
    Order,
    Raised,
    RemoteScheduler,
    Reply,
    Request,
    Served,
    UpdateLost,
    absolute,
    unsendable,
)
from aprilsched.fronts.ray.library import exceptions, named, ray
from aprilsched.kernel.shell import RefitReport
from aprilsched.kernel.shell import RolloutScheduler as AsyncRolloutScheduler
from aprilsched.kernel.weights.publisher import AdapterPublisher, WeightPublisher

POLL_S = 0.2
"""Seconds between two looks for an actor of the name."""
DETACH_S = 10.0
"""Seconds for notifying the actor that the trainer leaves; otherwise the next one replaces it."""
CLOSE_S = 120.0
"""Seconds that a scheduler has to close."""
ENGINES_S = 300.0
"""Seconds that engines have to answer after a restart of the actor."""

_started: dict[str, Any] = {}
"""The actors that this process has started: Ray ends an actor that has no handle."""


def start_scheduler(
    name: str,
    make: Callable[[], AsyncRolloutScheduler],
    *,
    restore: Path | str | None = None,
    **options: Any,
) -> None:
    """Start a scheduler as an actor of this name. It is opened when a trainer attaches to it.

    Ray restarts the actor when it dies. It is then opened from its store, so its
    :class:`aprilsched.RolloutScheduler` needs one, on a disk that every node has on which the actor
    may be restarted. Without a store, a scheduler whose actor has died is lost: every call raises
    SchedulerClosed.

    Args:
        name: name of the actor, by which trainers find it, in the Ray namespace of this process
            (``ray.init(namespace=...)``).
        make: returns the :class:`aprilsched.RolloutScheduler`, which is not opened yet. It is
            called in the actor, again after each restart. Ray must be able to send it;
            ``functools.partial`` adds arguments.
        restore: a checkpoint to start from, see :meth:`aprilsched.RolloutScheduler.restore`. A
            restart of the actor continues from the store.
        options: Ray's options of an actor, such as ``num_cpus`` (1), ``resources``,
            ``scheduling_strategy``, ``runtime_env`` and ``lifetime``. The actor ends with the
            process that started it, unless it has ``lifetime="detached"``.

    Raises:
        ValueError: from Ray, if there is an actor of this name; :func:`stop_scheduler` ends it.
    """
    options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": -1, **options, "name": name}
    order = Order(make=make, checkpoint=None if restore is None else absolute(restore))
    _started[name] = ray.remote(SchedulerActor).options(**options).remote(name, order)


def stop_scheduler(name: str) -> None:
    """Close the scheduler of this name and end its actor, if there is one.

    Requests are aborted, every engine continues, and the store has the last state.
    """
    actor = named(name)
    if actor is not None:
        with suppress(exceptions.RayActorError, exceptions.GetTimeoutError):
            ray.get(actor.close.remote(), timeout=CLOSE_S)
        ray.kill(actor)


@dataclass(frozen=True, kw_only=True)
class Possessions:
    """What a trainer's side has, which it sends with each request."""

    trainer: tuple[int, str] = (0, "")
    """When the trainer's side was made, in ns, and a random name; the default if none is attached.
    The greater one is the later one."""
    last: int = -1
    """The last whole batch; batches come in the order of their numbers."""
    streamed: frozenset[int] = frozenset()
    """Groups of batch ``last + 1``, which it takes group by group."""
    is_updating: bool = False
    """Whether an update has not ended, so that engines may have different versions."""
    is_asleep: bool = False
    """Whether it is in a block of asleep()."""

    @property
    def progress(self) -> tuple[int, int]:
        """Increases with everything that the trainer takes."""
        return self.last, len(self.streamed)


class SchedulerActor(Served):
    """The actor; each start of its process makes a new object."""

    def __init__(self, name: str, order: Order) -> None:
        super().__init__()
        gc.freeze()  # as the scheduler's process does
        self._name = name
        self._order = order
        self._is_restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._has = Possessions()
        """What the trainer that is attached has."""
        self._admitting = asyncio.Lock()

    async def request(self, has: Possessions, request: Request) -> Reply:
        """Carry out a request of a trainer, which is attached by its first one."""
        try:
            async with self._admitting:
                await self._admit(has, is_notice=request.name in NOTICES)
            if request.name == "update_weights" and self._has_version(request, has):
                report = RefitReport(version=self.opened.version, quarantined={}, seconds=0.0)
                return self.reply(report)
            reply = await self.answer(request)
            if request.name == "acknowledge":
                # Ray repeats the request unless it is answered.
                await self.opened.saved()
            self._check_attached(has)
            return reply
        except BaseException as error:
            return self.refusal(error)

    async def detach(self, has: Possessions) -> None:
        """Let a trainer leave."""
        async with self._admitting:
            if has.trainer == self._has.trainer:
                self._has = Possessions()
                await self._end_session()

    async def _admit(self, has: Possessions, *, is_notice: bool) -> None:
        """Attach a trainer, and open the scheduler if it is not open.

        Raises:
            SchedulerClosed: if another trainer has attached, or if the scheduler cannot be resumed.
            Exception: from opening the scheduler.
        """
        self._check_attached(has)
        before = self._has
        is_same = has.trainer == before.trainer
        if is_same and self.scheduler is not None and has.progress <= before.progress:
            return
        self._has = has
        if is_same and is_notice and self._in_transit is not None:
            # It is the notice "take".
            return
        if not is_same:
            await self._end_session()
        until = time.monotonic() + ENGINES_S
        while self.scheduler is None:
            try:
                self.scheduler = await self._resumed(has)
            except EngineError:
                # The engines may have died with the actor, and restart too.
                if not self._is_restarted or time.monotonic() > until:
                    raise
                await asyncio.sleep(1.0)
        # An older request, which Ray has repeated, may have opened it for a trainer that had less.
        known = self.scheduler.state.delivery.unacknowledged
        self.scheduler.trainer_has([each for each in known if each <= has.last], has.streamed)

    def _check_attached(self, has: Possessions) -> None:
        """Raise SchedulerClosed for a trainer that another one has replaced."""
        if has.trainer < self._has.trainer:
            raise SchedulerClosed(
                f"another trainer has attached to the scheduler actor {self._name!r}; one "
                "scheduler has one trainer."
            )

    def _has_version(self, request: Request, has: Possessions) -> bool:
        """Return whether an update, which Ray repeats after a restart, was complete before."""
        is_complete = request.named["version"] == self.opened.version
        return self._is_restarted and is_complete and not has.is_updating

    async def _end_session(self) -> None:
        """End the calls, updates and blocks of the trainer that was attached."""
        await self.end_calls()
        if self._in_transit is not None:
            # With a store it is delivered again; without one it would be lost.
            if self.opened.stored:
                self.take(self._in_transit.index)
            else:
                self.hand_back()
        gone = Raised.of(RefitError("the trainer that was loading weights is gone."))
        while self._blocks:
            with suppress(Exception):
                await self.leave(gone)

    async def _resumed(self, has: Possessions) -> AsyncRolloutScheduler:
        """Open the scheduler, from its store after a restart."""
        if has.is_asleep:
            raise SchedulerClosed(
                f"the scheduler actor {self._name!r} died inside of an asleep() block, and the "
                "memory of the engines is unknown; restart the servers."
            )
        made = self.made(self._order)
        if made.restores:
            raise ConfigError(
                "the scheduler's function restores a checkpoint, and would do so again after each "
                "restart of the actor; give start_scheduler() the checkpoint, as restore=path."
            )
        if self._is_restarted and not made.stored:
            raise SchedulerClosed(
                f"the scheduler actor {self._name!r} has died, and its scheduler has no store to "
                "go on from; give it store=SqliteStore(path) on a disk that every node has."
            )
        if self._order.checkpoint is not None and not self._is_restarted:
            made.restore(self._order.checkpoint)
        if has.is_updating:
            made.suspect_weights()
        await made.__aenter__()
        batches = made.state.in_flight.counters.batches
        if has.last >= batches:
            await made.close()
            raise StoreError(
                f"the trainer has batch {has.last}, and the store of the scheduler actor "
                f"{self._name!r} has no more than {batches} batches; give its scheduler a store "
                "that outlives the actor, on a disk that every node has."
            )
        return made


class ActorScheduler(RemoteScheduler):
    """The scheduler of an actor, with the methods of :class:`aprilsched.RolloutScheduler`.

    ::

        async with ActorScheduler("rollouts") as rollouts:
            async for batch in rollouts:
                ...

    Every method is a coroutine, `state` too. Any number of these objects
    may be open in one event loop, each with another actor. One actor has one trainer: if another
    object attaches to it, this one's calls raise SchedulerClosed, and the batches that this one did
    not acknowledge are delivered to the other.

    A call waits while Ray restarts the actor, and is then repeated. Leaving the ``async with``
    block leaves the scheduler as it is, for the next trainer; `stop_scheduler` ends it.

    Args:
        name: name of the actor.
        wait_s: seconds until the first attachment within which the actor must have started.

    Raises:
        SchedulerClosed: by every call, if the actor has ended, if it was restarted and has no
            store, or if another trainer has attached to it.
    """

    def __init__(self, name: str, *, wait_s: float = 300.0) -> None:
        super().__init__()
        self._name = name
        self._wait_s = wait_s
        self._has = Possessions(trainer=(time.time_ns(), uuid.uuid4().hex))
        self._actor: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_notice: asyncio.Future[Reply] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._wait_s):
                while (actor := named(self._name)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                self._actor = actor
                reply = await self._transmit(Request(PING, "withdraw", (PING,)))
        except TimeoutError:
            raise SchedulerClosed(
                f"the scheduler actor {self._name!r} was not there, or did not answer, within "
                f"{self._wait_s:g} s; look at `ray status` and `ray list actors`, and start it "
                "again."
            ) from None
        reply.get()
        self._version, self._failure = reply.version, None
        return self

    async def close(self) -> None:
        """Detach, and leave the scheduler running.

        The next trainer gets the batches that this one has not acknowledged.
        """
        await self._end_updates()
        if self._failure is None:
            with suppress(Exception):
                async with asyncio.timeout(DETACH_S):
                    # Notices arrive before it.
                    await self.notify("withdraw", PING)
                    await self._actor.detach.remote(self._has)
            self._failure = SchedulerClosed("use the scheduler inside its `async with` block.")

    def restore(self, path: Path | str) -> None:
        """Refused, because the actor restores itself.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("give start_scheduler() the checkpoint, as restore=path.")

    def _transmit(self, request: Request) -> asyncio.Future[Reply]:
        reply = asyncio.ensure_future(self._reply(request, self._last_notice))
        if request.name in NOTICES:
            self._last_notice = reply
        return reply

    async def _reply(self, request: Request, before: asyncio.Future[Reply] | None) -> Reply:
        if before is not None:
            # Ray does not keep the order of calls.
            await asyncio.wait([before])
        try:
            return await self._actor.request.remote(self._has, request)
        except TypeError as error:
            raise unsendable(f"an argument of {request.name}()", error) from error
        except exceptions.RayActorError as error:
            if error.actor_init_failed:
                reason = AprilschedError(str(error).strip().splitlines()[-1])
                raise unsendable("the function that makes the scheduler", reason) from error
            raise SchedulerClosed(
                f"the scheduler actor {self._name!r} has ended; start it again."
            ) from error

    def take(self) -> None:
        part, has = self._offered, self._has
        if part is not None and part.complete:
            self._has = replace(has, last=part.index, streamed=frozenset())
        elif part is not None:
            groups = frozenset(unit.unit_id for unit in part.units)
            # A call for a whole batch, or an update, may have ended the batch of earlier groups.
            before = has.streamed if has.last == part.index - 1 else frozenset[int]()
            self._has = replace(has, last=part.index - 1, streamed=before | groups)
        super().take()

    def _acknowledge(self, index: int) -> None:
        """Acknowledge a batch, from any thread of this process."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(super()._acknowledge, index)

    async def update_weights(
        self,
        publisher: WeightPublisher,
        *,
        version: int | None = None,
        acknowledge: bool = True,
    ) -> RefitReport:
        """Bring new weights into every engine.

        The publisher is sent to the actor and runs there, or here if it is a `FromTrainer`. If the
        actor dies in the update, the whole update is repeated.
        """
        # Ray may repeat the call after the scheduler has the version.
        number = self.version + 1 if version is None else version
        self._has = replace(self._has, is_updating=not isinstance(publisher, AdapterPublisher))
        try:
            while True:
                with suppress(UpdateLost):
                    return await super().update_weights(
                        publisher, version=number, acknowledge=acknowledge
                    )
        finally:
            self._has = replace(self._has, is_updating=False)

    @asynccontextmanager
    async def asleep(
        self, *, tags: Sequence[str] = ("kv_cache", "weights")
    ) -> AsyncGenerator[None]:
        """Release the engines' memory; a restarted actor does not know what they have of it."""
        try:
            async with super().asleep(tags=tags):
                self._has = replace(self._has, is_asleep=True)
                yield
        finally:
            self._has = replace(self._has, is_asleep=False)


class RolloutScheduler(BlockingRemote):
    """The scheduler of an actor for a trainer that is not asyncio code: the methods of
    :class:`aprilsched.fronts.blocking.RolloutScheduler`, over an :class:`ActorScheduler`, which
    describes the arguments.

    Leaving the ``with`` block leaves the scheduler as it is, for the next trainer.
    """

    def __init__(self, name: str, *, wait_s: float = 300.0) -> None:
        super().__init__(ActorScheduler(name, wait_s=wait_s))
