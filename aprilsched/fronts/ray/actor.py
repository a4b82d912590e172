"""The scheduler as a named Ray actor: its start, its end, and its answers to trainers.

Ray restarts the actor when it dies, and repeats the requests in flight. Each request states what
its trainer has, so the first one can open the scheduler from its store.

Invariants:

- One trainer is attached at a time. The latest one wins, and the others get SchedulerClosed.
- A request that Ray repeats after a restart finds a scheduler that knows what the trainer has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprilsched.errors import ConfigError, EngineError, RefitError, SchedulerClosed, StoreError
from aprilsched.fronts.ray.library import exceptions, named, ray
from aprilsched.fronts.remote import (
    NOTICES,
    Order,
    Raised,
    Reply,
    Request,
    Served,
    absolute,
    unsendable,
)
from aprilsched.kernel.shell import RefitReport
from aprilsched.kernel.shell import RolloutScheduler as AsyncRolloutScheduler

log = logging.getLogger("aprilsched")

READY_S = 10.0
"""Seconds that an actor has to report that it runs, before it is killed without being closed."""
CLOSE_S = 120.0
"""Seconds that a scheduler has to close."""
ENGINES_S = 300.0
"""Seconds that engines have to answer after a restart of the actor."""

_started: dict[tuple[str | None, str], Any] = {}
"""The actors that this process has started: Ray ends an actor that has no handle."""


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
            called in the actor, again after each restart. Ray must be able to send it;
            ``functools.partial`` adds arguments.
        namespace: Ray namespace of the name; None for that of this process, which is another one
            in every program that does not choose it by ``ray.init(namespace=...)``.
        restore: a checkpoint to start from, see :meth:`aprilsched.RolloutScheduler.restore`. A
            restart of the actor continues from the store.
        options: Ray's options of an actor, such as ``num_cpus`` (1), ``resources``,
            ``scheduling_strategy``, ``runtime_env`` and ``lifetime``. The actor ends with the
            process that started it, unless it has ``lifetime="detached"``.

    Raises:
        ConfigError: if there is an actor of this name, or if `make` cannot be sent.
    """
    defaults = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": -1}
    options = {**defaults, **options, "name": name, "namespace": namespace}
    order = Order(make=make, checkpoint=None if restore is None else absolute(restore))
    try:
        actor = ray.remote(SchedulerActor).options(**options).remote(name, order)
    except ValueError as error:
        if named(name, namespace) is None:
            raise
        raise ConfigError(
            f"there is an actor {name!r} already; attach to it, end it by stop_scheduler(), or "
            "choose another name."
        ) from error
    except TypeError as error:
        raise unsendable("the function that makes the scheduler", error) from error
    _started[namespace, name] = actor


def stop_scheduler(name: str, *, namespace: str | None = None) -> None:
    """Close the scheduler of this name and end its actor, if there is one.

    Requests are aborted, every engine continues, and the store has the last state.
    """
    actor = named(name, namespace)
    if actor is None:
        return
    try:
        # An actor that waits for room in the cluster has nothing to close.
        ray.get(actor.__ray_ready__.remote(), timeout=READY_S)
        ray.get(actor.close.remote(), timeout=CLOSE_S)
    except (exceptions.RayActorError, exceptions.GetTimeoutError) as error:
        log.warning("scheduler actor %s was not closed: %s", name, type(error).__name__)
    ray.kill(actor)
    _started.pop((namespace, name), None)


@dataclass(frozen=True, order=True)
class TrainerId:
    """One trainer's side; the later one is the greater one."""

    started_ns: int
    name: str


@dataclass(frozen=True, kw_only=True)
class Possessions:
    """What a trainer's side has, which it sends with each request."""

    trainer: TrainerId
    last: int = -1
    """The last whole batch; batches come in the order of their numbers."""
    streamed: frozenset[int] = frozenset()
    """Groups of batch ``last + 1``, which it takes group by group."""
    blocks: tuple[str, ...] = ()
    """The blocks that it is in."""
    is_unsure: bool = False
    """Whether an update has not ended, so that engines may have parts of two versions."""

    @property
    def progress(self) -> tuple[int, int]:
        """Increases with everything that the trainer takes."""
        return self.last, len(self.streamed)


class SchedulerActor(Served):
    """The actor; each start of its process makes a new object."""

    def __init__(self, name: str, order: Order) -> None:
        super().__init__()
        self._name = name
        self._order = order
        self._is_restarted = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._has: Possessions | None = None
        """What the trainer that is attached has; None if none is."""
        self._admitting = asyncio.Lock()

    async def request(self, has: Possessions, request: Request) -> Reply:
        """Carry out a request of a trainer, which is attached by its first one."""
        try:
            async with self._admitting:
                await self._admit(has, is_notice=request.name in NOTICES)
        except BaseException as error:
            return self.refusal(error)
        if request.name == "update_weights" and self._has_version(request, has):
            return self.reply(RefitReport(version=self.opened.version, quarantined={}, seconds=0.0))
        reply = await self.answer(request)
        if request.name == "acknowledge":
            # Ray repeats the request unless it is answered.
            await self.opened.saved()
        replaced = self._replacement(has)
        return reply if replaced is None else self.refusal(replaced)

    async def detach(self, has: Possessions) -> None:
        """Let a trainer leave."""
        async with self._admitting:
            if self._has is not None and has.trainer == self._has.trainer:
                self._has = None
                await self._end_session()

    async def _admit(self, has: Possessions, *, is_notice: bool) -> None:
        """Attach a trainer, and open the scheduler if it is not open.

        Raises:
            SchedulerClosed: if another trainer has attached, or if the scheduler cannot be resumed.
            Exception: from opening the scheduler.
        """
        replaced = self._replacement(has)
        if replaced is not None:
            raise replaced
        before, is_known = self._has, False
        if before is not None and before.trainer == has.trainer:
            is_known = True
            # The notice of what the trainer has taken is behind `has`.
            if self.scheduler is not None and (is_notice or has.progress <= before.progress):
                return
        self._has = has
        if before is not None and not is_known:
            await self._end_session()
        is_new = not is_known or self.scheduler is None
        until = asyncio.get_running_loop().time() + ENGINES_S
        while self.scheduler is None:
            try:
                self.scheduler = await self._resumed(has)
            except EngineError:
                # The engines may have died with the actor, and restart too.
                if not self._is_restarted or asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(1.0)
        if is_new or self._opened_for_less(has):
            known = self.scheduler.state.delivery.unacknowledged
            self.scheduler.trainer_has([each for each in known if each <= has.last], has.streamed)

    def _opened_for_less(self, has: Possessions) -> bool:
        """Return whether an older request opened the scheduler.

        Such a scheduler would redeliver batches that the trainer has.
        """
        state = self.opened.state
        streamed = has.streamed - state.delivery.fresh.taken.keys()
        return any(batch.index <= has.last for batch in state.delivery.batches_again) or any(
            group.group_id in streamed for group in state.in_flight.ready
        )

    def _replacement(self, has: Possessions) -> SchedulerClosed | None:
        """Return the error for a trainer that another one has replaced, or None."""
        if self._has is None or has.trainer >= self._has.trainer:
            return None
        return SchedulerClosed(
            f"another trainer has attached to the scheduler actor {self._name!r}; one scheduler "
            "has one trainer."
        )

    def _has_version(self, request: Request, has: Possessions) -> bool:
        """Return whether an update, which Ray repeats after a restart, was complete before."""
        is_complete = request.named["version"] == self.opened.version
        return self._is_restarted and not has.is_unsure and is_complete

    async def _end_session(self) -> None:
        """End the calls, updates and blocks of the trainer that was attached."""
        calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        if calls:
            await asyncio.wait(calls)
        if self._on_its_way is not None:
            # With a store it is delivered again; without one it would be lost.
            if self.opened.stored:
                self.take(self._on_its_way.index)
            else:
                self.hand_back()
        gone = Raised.of(RefitError("the trainer that was loading weights is gone."))
        with suppress(Exception):
            await self.finish_update(gone)
        while self._blocks:
            with suppress(Exception):
                await self.leave(gone)

    async def _resumed(self, has: Possessions) -> AsyncRolloutScheduler:
        """Open the scheduler, from its store after a restart."""
        if has.blocks:
            raise SchedulerClosed(
                f"the scheduler actor {self._name!r} died inside of a {has.blocks[0]}() block, and "
                "the engines must stay as they are; leave the block first."
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
        if has.is_unsure:
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
