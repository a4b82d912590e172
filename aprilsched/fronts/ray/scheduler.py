"""What a trainer has of a scheduler that is a Ray actor.

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

If the actor dies during a call, Ray restarts the actor and repeats the call. Each call states what
the trainer has, so the scheduler opens its store and delivers the other batches again.

Invariants:

- A batch that a trainer's call has returned is not returned by it again, and one that was
  acknowledged is never delivered again.
- After an update that a death has cut short, no engine generates before the update was repeated:
  an engine may have parts of two versions under the label of one.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from aprilsched.errors import AprilschedError, ConfigError, SchedulerClosed
from aprilsched.fronts.ray.actor import Possessions, TrainerId
from aprilsched.fronts.ray.library import exceptions, last_line, named
from aprilsched.fronts.remote import (
    NOTICES,
    PING,
    BlockingRemote,
    Raised,
    RemoteScheduler,
    Reply,
    Request,
    UpdateLost,
    unsendable,
)
from aprilsched.kernel.shell import RefitReport
from aprilsched.kernel.weights.publisher import AdapterPublisher, WeightPublisher

WAIT_S = 300.0
"""Default of `wait_s`."""
POLL_S = 0.2
"""Seconds between two looks for an actor of the name."""
DETACH_S = 10.0
"""Seconds for notifying the actor that the trainer leaves; otherwise the next one replaces it."""


class ActorScheduler(RemoteScheduler):
    """The scheduler of an actor, with the methods of :class:`aprilsched.RolloutScheduler`.

    ::

        async with ActorScheduler("rollouts") as rollouts:
            async for batch in rollouts:
                ...

    Every method is a coroutine, :meth:`state` too. Any number of these objects
    may be open in one event loop, each with another actor. One actor has one trainer: if another
    object attaches to it, this one's calls raise SchedulerClosed, and the batches that this one did
    not acknowledge are delivered to the other.

    A call waits while Ray restarts the actor, and is then repeated. Leaving the ``async with``
    block leaves the scheduler as it is, for the next trainer; :func:`stop_scheduler` ends it.

    Args:
        name: name of the actor.
        namespace: Ray namespace of the name; None for that of this process.
        wait_s: seconds until the first attachment within which the actor must have started.

    Raises:
        SchedulerClosed: by every call, if the actor has ended, if it was restarted and has no
            store, or if another trainer has attached to it.
    """

    def __init__(self, name: str, *, namespace: str | None = None, wait_s: float = WAIT_S) -> None:
        if not wait_s > 0:
            raise ConfigError(f"wait_s is {wait_s}; give a number of seconds above 0.")
        super().__init__()
        self._name = name
        self._namespace = namespace
        self._wait_s = wait_s
        self._has = Possessions(trainer=TrainerId(time.time_ns(), uuid.uuid4().hex))
        self._actor: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None
        """The error because of which calls can no longer be answered; None while they can."""
        self._last_notice: asyncio.Future[Reply] | None = None

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise SchedulerClosed("an ActorScheduler is entered once; make a new one.")
        self._loop = asyncio.get_running_loop()
        cause = "there is no actor of this name"
        limit = asyncio.timeout(self._wait_s)
        try:
            async with limit:
                while (actor := named(self._name, self._namespace)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                cause = "it does not answer"
                self._actor = actor
                reply = await self.send(Request(PING, "withdraw", (PING,)))
        except TimeoutError:
            if not limit.expired():
                raise
            raise SchedulerClosed(
                f"the scheduler actor {self._name!r} could not be used for {self._wait_s:g} s "
                f"({cause}); look at `ray status` and `ray list actors`, and start it again."
            ) from None
        reply.get()
        self._version = reply.version
        return self

    async def close(self) -> None:
        """Detach, and leave the scheduler running.

        The next trainer gets the batches that this one has not acknowledged.
        """
        await self._end_updates()
        if self._actor is not None and self._failure is None:
            with suppress(Exception):
                async with asyncio.timeout(DETACH_S):
                    # Notices arrive before it.
                    await self.notify("withdraw", PING)
                    await self._actor.detach.remote(self._has)
        closed = SchedulerClosed("use the scheduler inside its `async with` block.")
        self._failure = self._failure or closed

    def restore(self, path: Path | str) -> None:
        """Refused, because the actor restores itself.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("give start_scheduler() the checkpoint, as restore=path.")

    def _connection(self) -> Self:
        if self._failure is not None:
            raise self._failure
        if self._actor is None:
            raise SchedulerClosed("use the scheduler inside its `async with` block.")
        return self

    def send(self, request: Request) -> asyncio.Future[Reply]:
        """Send a request; see :class:`~aprilsched.fronts.remote.Transport`."""
        reply = asyncio.ensure_future(self._reply(request, self._last_notice))
        if request.name in NOTICES:
            self._last_notice = reply
        return reply

    async def _reply(self, request: Request, before: asyncio.Future[Reply] | None) -> Reply:
        if before is not None:
            # Ray does not keep the order of calls.
            await asyncio.wait([before])
        try:
            reply: Reply = await self._actor.request.remote(self._has, request)
        except TypeError as error:
            raise unsendable(f"an argument of {request.name}()", error) from error
        except exceptions.RayActorError as error:
            if error.actor_init_failed:
                reason = AprilschedError(last_line(error))
                raise unsendable("the function that makes the scheduler", reason) from error
            raise SchedulerClosed(
                f"the scheduler actor {self._name!r} has ended; start it again."
            ) from error
        except exceptions.RayTaskError as error:
            raise ConfigError(
                f"what the scheduler returned cannot be sent to the trainer ({error.cause}); give "
                "prompts only metadata that pickle can take."
            ) from error
        return reply

    def take(self) -> None:
        part, has = self._offered, self._has
        if part is not None:
            groups = frozenset(group.group_id for group in part.groups)
            if part.complete:
                self._has = replace(has, last=part.index, streamed=frozenset())
            elif has.last == part.index - 1:
                self._has = replace(has, streamed=has.streamed | groups)
            else:
                # A call for a whole batch, or an update, has ended the batch of the groups before.
                self._has = replace(has, last=part.index - 1, streamed=groups)
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

        The publisher is sent to the actor and runs there, or here if it is a
        :class:`~aprilsched.fronts.ray.FromTrainer`. If the actor dies in the update, that is
        repeated as a whole.
        """
        # Ray may repeat the call after the scheduler has the version.
        number = self.version + 1 if version is None else version
        return await super().update_weights(publisher, version=number, acknowledge=acknowledge)

    async def _carried_out(
        self, publisher: WeightPublisher, update: Callable[[], Awaitable[RefitReport]]
    ) -> RefitReport:
        before = self._has
        if not isinstance(publisher, AdapterPublisher):
            self._has = replace(before, is_unsure=True)
        while True:
            try:
                report = await update()
            except UpdateLost:
                continue
            except ConfigError:
                # The update was refused before anything was loaded.
                self._has = replace(self._has, is_unsure=before.is_unsure)
                raise
            if not isinstance(publisher, AdapterPublisher):
                self._has = replace(self._has, is_unsure=False)
            return report

    @asynccontextmanager
    async def _block(self, name: str, **named: object) -> AsyncGenerator[Any]:
        moves_weights = name == "paused_for_weights"
        async with super()._block(name, **named) as entered:
            has = self._has
            is_unsure = has.is_unsure or moves_weights
            self._has = replace(has, blocks=(*has.blocks, name), is_unsure=is_unsure)
            yield entered
        if moves_weights:
            self._has = replace(self._has, is_unsure=False)

    async def _left(self, raised: Raised | None) -> None:
        *outer, name = self._has.blocks
        if name == "asleep":
            try:
                await super()._left(raised)
            except SchedulerClosed as error:
                # The memory of the engines is unknown.
                self._failure = error
                raise
        self._has = replace(self._has, blocks=tuple(outer))
        if name != "asleep":
            await super()._left(raised)


class RolloutScheduler(BlockingRemote):
    """The scheduler of an actor for a trainer that is not asyncio code: the methods of
    :class:`aprilsched.fronts.blocking.RolloutScheduler`, over an :class:`ActorScheduler`, which
    describes the arguments.

    Leaving the ``with`` block leaves the scheduler as it is, for the next trainer.
    """

    def __init__(self, name: str, *, namespace: str | None = None, wait_s: float = WAIT_S) -> None:
        super().__init__(ActorScheduler(name, namespace=namespace, wait_s=wait_s))
