"""The scheduler as a named Ray actor, and what a trainer has of it.

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

What is lost with a process is told again by the other side. The trainer's side numbers the batches
that it has, and whether each was acknowledged. Each *life* of the actor, from a start of its
process to the end, has a name of its own, which every call carries. A call that meets another
life, or none, makes the trainer's side *attach* again: it waits for the actor, says which batches
it has, and whether an update of the weights was under way. The scheduler, which has opened its
store, delivers the other batches again. Then the call is repeated.

Invariants:

- A batch that a trainer's call has returned is not returned by it again, and one that was
  acknowledged is never delivered again.
- After an update that a death has cut short, no engine generates before the update was repeated:
  an engine may have parts of two versions under the label of one.
- One trainer is attached at a time. The one that has come last wins, and the others are told so.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

from aprilsched.coordinator import BiasNow, RefitReport
from aprilsched.coordinator import RolloutScheduler as AsyncRolloutScheduler
from aprilsched.core.state.state import SchedulerState
from aprilsched.errors import (
    AprilschedError,
    ConfigError,
    EngineError,
    RefitError,
    SchedulerClosed,
    StoreError,
)
from aprilsched.ray.library import ActorAway, ActorCaller, LoopActor, exceptions, named, ray
from aprilsched.remote import (
    Answer,
    BlockingRemote,
    FromTrainer,
    Raised,
    RemoteScheduler,
    Served,
    absolute,
    checked_scheduler,
    unsendable,
)
from aprilsched.types import Batch
from aprilsched.weights.publisher import AdapterPublisher, WeightPublisher

__all__ = ["ActorScheduler", "RolloutScheduler", "start_scheduler", "stop_scheduler"]

log = logging.getLogger("aprilsched")

T = TypeVar("T")

_WAIT_S = 300.0
_LOOK_S = 0.2
"""Seconds until an actor that is away is looked for again."""
_DETACH_S = 10.0
"""Seconds in which the actor is told that the trainer leaves; it goes on if it is not told."""
_READY_S = 10.0
"""Seconds that an actor has to say that it runs, before it is ended without being closed."""
_END_S = 120.0
"""Seconds that a scheduler has to close."""


def start_scheduler(
    name: str,
    make: Callable[[], AsyncRolloutScheduler],
    *,
    namespace: str | None = None,
    restore: Path | str | None = None,
    **options: Any,
) -> None:
    """Start a scheduler as an actor of this name. It is opened when a trainer attaches to it.

    Ray restarts the actor when it dies. It is then opened from its store, so its
    :class:`aprilsched.RolloutScheduler` needs one, on a disk that every node has on which the actor
    may be restarted. Without a store, a scheduler whose actor has died is lost: every call raises
    SchedulerClosed.

    Args:
        name: name of the actor, by which trainers find it.
        make: returns the :class:`aprilsched.RolloutScheduler`, which is not opened yet. It is
            called in the actor, again after each restart, and must be something that Ray can send;
            ``functools.partial`` gives it arguments.
        namespace: Ray namespace of the name; None for that of this process, which is another one
            in every program that does not choose it by ``ray.init(namespace=...)``.
        restore: a checkpoint to begin with, see :meth:`aprilsched.RolloutScheduler.restore`. A
            restart of the actor goes on from the store.
        options: Ray's options of an actor, such as ``num_cpus`` (1), ``resources``,
            ``scheduling_strategy``, ``runtime_env`` and ``lifetime``. The actor ends with the
            process that started it, unless it has ``lifetime="detached"``.

    Raises:
        ConfigError: if there is an actor of this name, or if `make` cannot be sent.
    """
    options = {"num_cpus": 1, "max_restarts": -1, **options, "name": name, "namespace": namespace}
    order = _Order(name=name, make=make, restored=None if restore is None else absolute(restore))
    try:
        _started[namespace, name] = ray.remote(LoopActor).options(**options).remote(_Life, order)
    except ValueError as error:
        if named(name, namespace) is None:
            raise
        raise ConfigError(
            f"there is an actor {name!r} already; attach to it, end it by stop_scheduler(), or "
            "choose another name."
        ) from error
    except TypeError as error:
        raise unsendable("the function that makes the scheduler", error) from error


def stop_scheduler(name: str, *, namespace: str | None = None) -> None:
    """Close the scheduler of this name and end its actor. If there is none, nothing happens.

    Requests are aborted, every engine continues, and the store has the last state.
    """
    actor = named(name, namespace)
    if actor is None:
        return
    try:
        # An actor that waits for room in the cluster has nothing to close.
        ray.get(actor.__ray_ready__.remote(), timeout=_READY_S)
        ray.get(actor.do.remote("close"), timeout=_END_S)
    except (exceptions.RayActorError, exceptions.GetTimeoutError) as error:
        log.warning("the scheduler actor %s was not closed: %s", name, type(error).__name__)
    ray.kill(actor)
    _started.pop((namespace, name), None)


_started: dict[tuple[str | None, str], Any] = {}
"""The actors that this process has started, by namespace and name: Ray ends an actor of which
nobody has a handle."""


# --- the trainer's side --------------------------------------------------------------------------


class ActorScheduler(ActorCaller, RemoteScheduler):
    """The scheduler of an actor, with the methods of :class:`aprilsched.RolloutScheduler`.

    ::

        async with ActorScheduler("rollouts") as rollouts:
            async for batch in rollouts:
                ...

    Every method is a coroutine, :meth:`state` and :meth:`bias` too. Any number of these objects
    may be open in one event loop, each with another actor. One actor has one trainer: if another
    object attaches to it, this one's calls raise SchedulerClosed, and the batches that this one did
    not acknowledge are delivered to the other.

    A call waits while the actor is away, because it is just being restarted, and is then repeated.
    Leaving the ``async with`` block leaves the scheduler as it is, for the next trainer;
    :func:`stop_scheduler` ends it.

    Args:
        name: name of the actor.
        namespace: Ray namespace of the name; None for that of this process.
        wait_s: seconds that the actor may be away, and that it may take to start, before a call
            raises SchedulerClosed.

    Raises:
        SchedulerClosed: by every call, if the actor does not come back, if it was restarted and
            has no store, or if another trainer has attached to it.
    """

    def __init__(self, name: str, *, namespace: str | None = None, wait_s: float = _WAIT_S) -> None:
        if not wait_s > 0:
            raise ConfigError(f"wait_s is {wait_s}; give a number of seconds above 0.")
        super().__init__()
        self.name = name
        self._namespace = namespace
        self._wait_s = wait_s
        self._trainer = _Trainer(since=time.time_ns(), number=uuid.uuid4().hex)
        self._life: str | None = None
        """The life of the actor that this side is attached to; None if it must attach."""
        self._opened = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None
        """Why no call can be answered any more."""
        self._held: dict[int, bool] = {}
        """Batches that the trainer has, and whether it has acknowledged each. Those that the
        scheduler has said to be acknowledged are forgotten."""
        self._part: Batch | None = None
        """What the scheduler has offered last: a batch, or a part of one."""
        self._streamed: set[int] = set()
        """Groups that the trainer has of a batch that it takes group by group."""
        self._streamed_of = 0
        """Number of that batch."""
        self._telling: asyncio.Task[None] | None = None
        self._attaching = asyncio.Lock()
        self._unsure = False
        """Whether an engine may have parts of two versions, of which only the present life of the
        actor knows: an update is under way, or has failed."""
        self._loading = _Count()
        """Number of publishers and blocks of this side that are moving weights."""
        self._block_open: str | None = None
        self._watching: asyncio.Task[None] | None = None

    # --- life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._opened:
            raise SchedulerClosed("an ActorScheduler is entered once; make a new one.")
        self._opened, self._loop = True, asyncio.get_running_loop()
        await self._attach(None)
        self._watching = asyncio.create_task(self._watch())
        return self

    async def close(self) -> None:
        """Leave the scheduler as it is. The next trainer gets what this one has not
        acknowledged."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self._end_updates()
        if self._life is not None:
            with suppress(exceptions.RayError, TimeoutError):
                async with asyncio.timeout(_DETACH_S):
                    await self._told()
                    await self._actor.do.remote("detach", self._trainer)
        self._life = None
        self._failure = self._failure or SchedulerClosed(
            "use the scheduler inside its `async with` block."
        )

    async def _attach(self, lost: str | None) -> None:
        """Attach to the actor, if nobody has done so since the life `lost`."""
        async with self._attaching:
            if self._failure is not None:
                raise self._failure
            if self._life is not None and self._life != lost:
                return
            await self._told()
            self._life = None
            # A scheduler that opens its engines lets them continue.
            await self._loading.none()
            try:
                self._life = await self._attached()
            except SchedulerClosed as error:
                self._failure = error
                raise

    async def _attached(self) -> str:
        """Wait for the actor, and attach to it; returns the name of its life."""
        until = asyncio.get_running_loop().time() + self._wait_s
        said, cause = False, "there is no actor of this name"
        while True:
            try:
                async with asyncio.timeout_at(until):
                    self._actor = await asyncio.to_thread(named, self.name, self._namespace)
                    if self._actor is not None:
                        answer: _Answer = await self._actor.do.remote(
                            "attach",
                            self._trainer,
                            dict(self._held),
                            (self._streamed_of, frozenset(self._streamed)),
                            unsure=self._unsure,
                        )
                        error = None if answer.raised is None else answer.raised.again()
                        if error is None:
                            self._note(answer, tuple(self._held))
                            return answer.life
                        # The engines may have died with it, and are just being restarted.
                        if not (answer.restarted and isinstance(error, EngineError)):
                            raise error
                        cause = str(error)
            except exceptions.RayActorError as error:
                if error.actor_init_failed:
                    last = AprilschedError(str(error).strip().splitlines()[-1].strip())
                    raise unsendable("the function that makes the scheduler", last) from error
                cause = "it is being restarted, or waits for a node with its resources"
            except TimeoutError:
                if asyncio.get_running_loop().time() < until:
                    raise  # an error of the scheduler itself
                cause = cause if self._actor is None else f"{cause}, or it does not answer"
            if asyncio.get_running_loop().time() >= until:
                raise SchedulerClosed(
                    f"the scheduler actor {self.name!r} could not be used for {self._wait_s:g} s "
                    f"({cause}); look at `ray status` and `ray list actors`, and start it again."
                )
            if not said:
                said = True
                log.warning("waiting for the scheduler actor %s: %s", self.name, cause)
            await asyncio.sleep(_LOOK_S)

    def _note(self, answer: _Answer, held: Sequence[int]) -> None:
        """Take what an answer says, to a call that was made when the trainer had the batches
        `held`."""
        self._version = answer.version
        if answer.unacknowledged is not None:
            for index in held:
                if index not in answer.unacknowledged:
                    self._held.pop(index, None)

    async def _watch(self) -> None:
        """Attach again when the actor has been restarted, so that its engines do not wait for the
        trainer's next call."""
        while True:
            life = self._life
            if life is not None:
                with suppress(exceptions.RayError):
                    if await self._actor.do.remote("stay", self._trainer, life):
                        return  # another trainer has attached
            try:
                await self._attach(life)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                # The next call tells the trainer.
                log.error("the scheduler actor %s cannot be used: %s", self.name, error)
                return

    # --- calls ---------------------------------------------------------------------------------

    async def call(self, name: str, *arguments: object, **named: object) -> Any:
        call = partial(self._call, name, *arguments, **named)
        return await (call() if name in _ONCE else self._repeated(call))

    async def _repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        """What a call returns, which is made again whenever the actor was away."""
        while True:
            life = self._life
            try:
                return await call()
            except ActorAway:
                self._check_block()
                await self._attach(life)

    async def _call(self, name: str, *arguments: object, **named: object) -> Any:
        """Make a call once.

        Raises:
            ActorAway: if the actor has died meanwhile, or is not there.
        """
        if not self._opened:
            raise SchedulerClosed("use the scheduler inside its `async with` block.")
        if self._failure is not None:
            raise self._failure
        await self._told()
        life, held = self._life, tuple(self._held)
        if life is None:
            raise ActorAway
        answer: _Answer = await self._asked(self._number(life), name, arguments, named)
        if answer.life != life:
            raise ActorAway
        self._note(answer, held)
        try:
            return answer.get()
        except _Replaced as error:
            self._failure = error
            raise

    def _number(self, life: str) -> _Number:
        return _Number(self._trainer, life, next(self._numbers))

    def tell(self, name: str, *arguments: object) -> None:
        before = self._telling
        self._telling = asyncio.get_running_loop().create_task(self._tell(before, name, arguments))

    async def _tell(
        self, before: asyncio.Task[None] | None, name: str, arguments: Sequence[object]
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        life = self._life
        if life is not None:
            # If it does not arrive, the next attachment says the same.
            with suppress(exceptions.RayError):
                await self._actor.do.remote("answer", self._number(life), name, arguments, {})

    async def _told(self) -> None:
        """Wait until everything that was told has arrived."""
        if self._telling is not None:
            await asyncio.wait([self._telling])

    # --- batches -------------------------------------------------------------------------------

    async def offered(self, within: float | None = None, *, streamed: bool = False) -> Batch:
        self._part = await super().offered(within, streamed=streamed)
        return self._part

    def take(self) -> None:
        part = self._part
        if part is not None:
            if self._streamed and part.index != self._streamed_of:
                # An update, or a call for a whole batch, has ended the batch of the groups.
                self._held[self._streamed_of] = False
                self._streamed.clear()
            if part.complete:
                self._held[part.index] = False
                self._streamed.clear()
            else:
                self._streamed_of = part.index
                self._streamed.update(group.group_id for group in part.groups)
        super().take()

    def _acknowledge(self, index: int) -> None:
        """Acknowledge a batch from any thread of this process."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._acknowledge_here, index)

    def _acknowledge_here(self, index: int) -> None:
        if index in self._held:
            self._held[index] = True
        super()._acknowledge(index)

    def restore(self, path: Path | str) -> None:
        """Refused, because the actor restores itself.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("give start_scheduler() the checkpoint, as restore=path.")

    async def state(self) -> SchedulerState:
        """A copy of the scheduler's state."""
        return await self.call("state")

    async def bias(self) -> BiasNow:
        """How the delivered lengths differ so far from the law that lengths are drawn from."""
        return await self.call("bias")

    # --- weights -------------------------------------------------------------------------------

    async def update_weights(
        self,
        publisher: WeightPublisher,
        *,
        version: int | None = None,
        acknowledge: bool = True,
    ) -> RefitReport:
        """Bring new weights into every engine.

        The publisher is sent to the actor and runs there, or here if it is a
        :class:`~aprilsched.process.FromTrainer`. If the actor dies meanwhile, the update is
        repeated as a whole once it is back.
        """
        number = self.version + 1 if version is None else version
        if isinstance(publisher, AdapterPublisher):
            return await self._update(publisher, number, acknowledge)
        with self._changing_weights():
            if isinstance(publisher, FromTrainer):
                return await super().update_weights(
                    publisher, version=number, acknowledge=acknowledge
                )
            return await self._update(publisher, number, acknowledge)

    async def _update(
        self, publisher: WeightPublisher, version: int, acknowledge: bool
    ) -> RefitReport:
        call = partial(
            self._call, "update_weights", publisher, version=version, acknowledge=acknowledge
        )
        return await self._updated(call, version)

    @contextmanager
    def _changing_weights(self) -> Generator[None]:
        """Whatever happens in this block, the engines' weights are unsure until it has ended."""
        before, self._unsure = self._unsure, True
        try:
            yield
        except ConfigError:
            # The update was refused before anything was loaded.
            self._unsure = before
            raise
        self._unsure = False

    async def _publish_prepared(
        self, here: FromTrainer, version: int, acknowledge: bool, begun: asyncio.Event
    ) -> RefitReport:
        async def publish() -> RefitReport:
            with self._loading:
                return await RemoteScheduler._publish_prepared(
                    self, here, version, acknowledge, begun
                )

        return await self._updated(publish, version)

    async def _updated(
        self,
        update: Callable[[], Awaitable[RefitReport]],
        number: int,
    ) -> RefitReport:
        """Update, again if the actor was away, unless it has the version."""
        now = asyncio.get_running_loop().time
        started, tried = now(), None

        async def update_unless_done() -> RefitReport:
            nonlocal tried
            before, tried = tried, self._life
            # The scheduler of a new life trusts no engine before an unsure update was repeated.
            new_life = self._unsure and before != tried
            if before is not None and self.version == number and not new_life:
                return RefitReport(version=number, quarantined={}, seconds=now() - started)
            return await update()

        return await self._repeated(update_unless_done)

    @asynccontextmanager
    async def _block(self, name: str, **named: object) -> AsyncGenerator[Any]:
        with self._changing_weights():
            entered = await self._repeated(partial(self._call, "enter", name, **named))
            with self._loading:
                self._block_open = name
                try:
                    yield entered
                except BaseException as error:
                    with suppress(RefitError, SchedulerClosed):
                        await self._leave(name, Raised.of(error))
                    raise
                await self._leave(name, None)

    async def _leave(self, name: str, raised: Raised | None) -> None:
        self._block_open = None
        try:
            await self._call("leave", raised)
        except ActorAway:
            if name == "asleep":
                self._failure = SchedulerClosed(
                    f"the scheduler actor {self.name!r} died while the engines were asleep, and "
                    "nobody knows which memory they have; restart the servers, and attach again."
                )
                raise self._failure from None
            raise RefitError(
                "the scheduler actor died while the trainer was loading weights; load them again "
                "in another paused_for_weights() block."
            ) from None

    def _check_block(self) -> None:
        """Refuse to attach inside of a block, in which the engines must stay as they are.

        Raises:
            SchedulerClosed: if there is one.
        """
        if self._block_open is not None:
            raise SchedulerClosed(
                f"the scheduler actor {self.name!r} died inside of a {self._block_open}() block; "
                "leave the block first."
            )


class _Count:
    """Counts what is under way, and lets others wait until nothing is."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self._count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()

    async def none(self) -> None:
        await self._none.wait()


class RolloutScheduler(BlockingRemote):
    """The scheduler of an actor for a trainer that is not asyncio code: the methods of
    :class:`aprilsched.blocking.RolloutScheduler`, over an :class:`ActorScheduler`, which describes
    the arguments.

    Leaving the ``with`` block leaves the scheduler as it is, for the next trainer.
    """

    def __init__(self, name: str, *, namespace: str | None = None, wait_s: float = _WAIT_S) -> None:
        self._use_remote(ActorScheduler(name, namespace=namespace, wait_s=wait_s))


# --- between the two -----------------------------------------------------------------------------

_ONCE = frozenset({"begin_update", "end_update", "enter", "leave"})
"""Calls that only the one who makes them can repeat."""
_TOLD = frozenset({"acknowledge", "hand_back", "take"})
_SAVED = frozenset({"end_update", "update_weights"})
"""Calls that return once the store knows which batches are acknowledged."""


class _Replaced(SchedulerClosed):
    """Another trainer has attached to the scheduler."""


_Streamed: TypeAlias = tuple[int, frozenset[int]]
"""A batch that the trainer takes group by group, and the groups that it has of it."""


@dataclass(frozen=True, order=True)
class _Trainer:
    """Who has attached: one object of one process. The later one is the greater one."""

    since: int
    number: str


@dataclass(frozen=True)
class _Number:
    """The number of a call, which it has in one life of the actor."""

    trainer: _Trainer
    life: str
    count: int


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What every life of the actor begins with."""

    name: str
    make: Callable[[], AsyncRolloutScheduler]
    restored: Path | None


@dataclass(frozen=True, kw_only=True)
class _Answer(Answer):
    """What a call returned or raised in one life of the actor."""

    life: str
    restarted: bool
    unacknowledged: tuple[int, ...] | None = None
    """Batches that the scheduler, and its store, would deliver again; None if this was not
    asked."""


# --- the actor -----------------------------------------------------------------------------------


class _Life(Served):
    """The scheduler of one life of the actor."""

    def __init__(self, order: _Order) -> None:
        super().__init__()
        self._order = order
        self._restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._name = uuid.uuid4().hex
        self._trainer: _Trainer | None = None
        self._attaching = asyncio.Lock()
        self._replaced = asyncio.Event()
        """Set when the trainer that is attached is so no more."""

    # --- who is attached -----------------------------------------------------------------------

    async def attach(
        self, trainer: _Trainer, held: Mapping[int, bool], streamed: _Streamed, *, unsure: bool
    ) -> _Answer:
        """Let `trainer` use the scheduler; it has the batches `held` and the groups `streamed`.
        Open the scheduler, if it is not; with `unsure` its engines may have inconsistent
        weights."""
        try:
            if self._trainer is not None and trainer < self._trainer:
                raise self._another()
            async with self._attaching:
                await self._settle((held, streamed[1]) if trainer == self._trainer else None)
                if self._trainer != trainer:
                    self._replaced.set()
                    self._replaced = asyncio.Event()
                    self._trainer = trainer
                if self.scheduler is None:
                    await self._open(held, streamed, unsure=unsure)
                scheduler = self._opened
                scheduler.trainer_has(held, streamed[1])
                for index, acknowledged in held.items():
                    if acknowledged:
                        self.acknowledge(index)
        except BaseException as error:
            return self._said(raised=Raised.of(error, tell_where=True))
        return self._said(unacknowledged=self._unacknowledged())

    async def detach(self, trainer: _Trainer) -> None:
        """The trainer leaves."""
        async with self._attaching:
            if trainer == self._trainer:
                await self._settle(None)
                self._trainer = None
                self._replaced.set()

    async def stay(self, trainer: _Trainer, life: str) -> bool:
        """Return when the trainer is not attached any more: whether because of another one."""
        replaced = self._replaced
        if life == self._name and trainer == self._trainer:
            await replaced.wait()
        return self._trainer is not None and trainer < self._trainer

    async def _settle(self, has: tuple[Mapping[int, bool], frozenset[int]] | None) -> None:
        """End what the trainer that was attached has left open. It has the batches and the groups
        `has`; None if nobody knows that any more."""
        calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)
        if self._on_its_way is not None:
            part = self._on_its_way
            if has is None:
                # With a store it is delivered again; without one it would be gone.
                taken = self._opened.stored
            else:
                groups = {group.group_id for group in part.groups}
                taken = part.index in has[0] or (not part.complete and groups <= has[1])
            if taken:
                self.take(part.index)
            else:
                self.hand_back()
        gone = RefitError("the trainer that was loading weights is gone.")
        if self._update is not None:
            with suppress(Exception):
                await self.end_update(Raised.of(gone))
        while self._blocks:
            with suppress(Exception):
                await self.leave(Raised.of(gone))

    async def _open(self, held: Mapping[int, bool], streamed: _Streamed, *, unsure: bool) -> None:
        order = self._order
        made = checked_scheduler(order.make())
        if made.restores:
            raise ConfigError(
                "the scheduler's function restores a checkpoint, and would do so again after each "
                "restart of the actor; give start_scheduler() the checkpoint, as restore=path."
            )
        if self._restarted and not made.stored:
            raise SchedulerClosed(
                f"the scheduler actor {order.name!r} has died, and its scheduler has no store to "
                "go on from; give it store=SqliteStore(path) on a disk that every node has."
            )
        if order.restored is not None and not self._restarted:
            made.restore(order.restored)
        if unsure:
            made.suspect_weights()
        await made.__aenter__()
        in_flight, (index, groups) = made.state.in_flight, streamed
        batches = in_flight.counters.batches
        ready = {group.group_id for group in in_flight.ready}
        lacks = bool(groups) and (index > batches or (index == batches and not groups <= ready))
        if lacks or any(each >= batches for each in held):
            await made.close()
            raise StoreError(
                f"the trainer has batch {max([*held, index])}, and the store of the scheduler "
                f"actor {order.name!r} has no more than {batches} batches, or has not its groups; "
                "give its scheduler a store that outlives the actor, on a disk that every node has."
            )
        self.scheduler = made

    def _another(self) -> _Replaced:
        return _Replaced(
            f"another trainer has attached to the scheduler actor {self._order.name!r}; one "
            "scheduler has one trainer."
        )

    # --- calls ---------------------------------------------------------------------------------

    async def answer(
        self, number: _Number, name: str, arguments: Sequence[object], named: Mapping[str, object]
    ) -> _Answer:
        """Answer a call of the trainer that is attached."""
        if number.life != self._name:
            return self._said()
        if number.trainer != self._trainer:
            return self._said(raised=Raised.of(self._another()))
        if name in _TOLD:
            getattr(self, name)(*arguments)
            return self._said()
        call = self.begin(number, name, arguments, named)
        await asyncio.wait([call])
        if call.cancelled():
            # Calls are cancelled while another trainer takes this one's place, and the trainer is
            # told that, not that it has cancelled something.
            async with self._attaching:
                if self._trainer is not None and number.trainer < self._trainer:
                    return self._said(raised=Raised.of(self._another()))
        answer = self.outcome(call)
        saved = name in _SAVED and answer.raised is None
        return self._said(
            result=answer.result,
            raised=answer.raised,
            unacknowledged=self._unacknowledged() if saved else None,
        )

    def _unacknowledged(self) -> tuple[int, ...]:
        return tuple(self._opened.state.delivery.unacknowledged)

    def _said(self, **parts: Any) -> _Answer:
        return _Answer(life=self._name, restarted=self._restarted, version=self.version, **parts)
