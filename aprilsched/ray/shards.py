"""A shard in a Ray actor, on any node: the transport between a collector and a scheduler.

::

    def part(urls, store):
        return ShardParts(fleet=SGLangFleet(urls), reward=score, store=SqliteStore(store))

    shards = [
        RayShard("a", partial(part, urls[:64], "/shared/a.store")),
        RayShard("b", partial(part, urls[64:], "/shared/b.store")),
    ]
    async with ShardedScheduler(shards, prompts, config=config) as rollouts:
        ...

The collector opens a shard that was lost again, so Ray restarts nothing: a new actor takes its
place, on any node that has its resources, and continues from the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aprilsched.coordinator.refits import RefitReport
from aprilsched.core.config import SchedulerConfig
from aprilsched.engines.base import Engine
from aprilsched.ray.library import ActorAway, ActorCaller, LoopActor, exceptions, ray
from aprilsched.remote import Answer, Answering, FromTrainer, Raised, Served, absolute
from aprilsched.shards.base import News, Opened, Orders, Part, ShardLost
from aprilsched.shards.local import LocalShard, ShardParts
from aprilsched.types import Batch, Prompt
from aprilsched.weights.disk import DiskPublisher
from aprilsched.weights.publisher import WeightPublisher

_END_S = 60.0
"""Seconds that a shard has to close."""


class RayShard(ActorCaller):
    """A shard in an actor of its own.

    Weights reach its engines from a :class:`~aprilsched.DiskPublisher`, which saves once in this
    process and loads in every actor, from a :class:`~aprilsched.process.FromTrainer`, which moves
    tensors from this process to the engines of all shards together, or from any other publisher
    that Ray can send.

    Args:
        name: name of the shard.
        parts: makes the parts of the shard, in the actor, each time it is opened. It must be
            something that Ray can send. A store must be on a disk of every node on which the actor
            may be started.
        options: Ray's options of an actor, such as ``num_cpus`` (1), ``resources``,
            ``scheduling_strategy`` and ``runtime_env``.
    """

    def __init__(self, name: str, parts: Callable[[], ShardParts], **options: Any) -> None:
        super().__init__()
        self.name = name
        self._parts = parts
        self._options = {"num_cpus": 1, **options, "max_restarts": 0}

    # --- lifetime ------------------------------------------------------------------------------

    async def open(
        self,
        config: SchedulerConfig,
        *,
        log: Path | None,
        checkpoint: Path | None,
        suspect: bool,
    ) -> Opened:
        """Start an actor, and begin there."""
        await self.close()
        actor = ray.remote(LoopActor).options(**self._options)
        self._actor = actor.remote(_ServedShard, self.name)
        return await self._call(
            "open",
            self._parts,
            config,
            log=None if log is None else absolute(log),
            checkpoint=None if checkpoint is None else absolute(checkpoint),
            suspect=suspect,
        )

    async def close(self) -> None:
        """Close the scheduler, and end the actor."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        with suppress(exceptions.RayError, TimeoutError):
            async with asyncio.timeout(_END_S):
                await actor.do.remote("close")
        await asyncio.to_thread(ray.kill, actor)

    # --- messages ------------------------------------------------------------------------------

    async def tell(self, orders: Orders) -> None:
        """Carry out orders; see :meth:`aprilsched.shards.Shard.tell`."""
        await self._call("tell", orders)

    async def ask(self) -> News:
        """Wait for news; see :meth:`aprilsched.shards.Shard.ask`."""
        return await self._call("ask")

    async def evaluate(self, prompts: Sequence[Prompt], group_size: int) -> Batch:
        """Generate responses; see :meth:`aprilsched.shards.Shard.evaluate`."""
        return await self._call("evaluate", tuple(prompts), group_size)

    async def checkpoint(self, path: Path) -> None:
        """Write the state to a file; see :meth:`aprilsched.shards.Shard.checkpoint`."""
        await self._call("checkpoint", absolute(path))

    async def update(self, publisher: WeightPublisher, version: int) -> RefitReport:
        """Load a version; see :meth:`aprilsched.shards.Shard.update`."""
        part = publisher if isinstance(publisher, Part) else None
        original = publisher if part is None else part.joint.publisher
        if isinstance(original, FromTrainer):
            return await self._update_from_here(original, publisher, version)
        if part is not None:
            part.leave()
        sent = original
        if isinstance(original, DiskPublisher):
            # What was saved is a directory for the others; the trainer's model stays here.
            sent = DiskPublisher(absolute(original.path(version)))
        report = await self._call("update", _Prepared(sent), version)
        if isinstance(original, DiskPublisher):
            # Of the versions before this one, only those that are kept stay on the disk.
            await original.publish(version, ())
        return report

    async def _update_from_here(
        self, here: FromTrainer, publisher: WeightPublisher, version: int
    ) -> RefitReport:
        """Let the trainer's process move the tensors, to the engines of all shards together."""
        await here.open(version)
        names: tuple[str, ...] | RefitReport = await self._call("begin_update", version)
        if isinstance(names, RefitReport):
            return names
        raised: Raised | None = None
        try:
            engines = here.opened(names)
            outcomes = await publisher.publish(version, engines)
            failed = [outcomes[engine.name] for engine in engines]
            if all(failed) and failed[0] is not None:
                raise failed[0]
        except Exception as error:
            raised = Raised.of(error)
        return await self._call("end_update", raised)

    async def _call(self, name: str, *arguments: object, **named: object) -> Any:
        """Call a method in the actor.

        Raises:
            ShardLost: if the actor has died.
            Exception: what the method raises.
        """
        if self._actor is None:
            raise ShardLost(f"{self.name} is not open.")
        try:
            answer: Answer = await self._asked(next(self._numbers), name, arguments, named)
        except ActorAway as error:
            raise ShardLost(f"the actor of {self.name} has died: {error}") from error
        return answer.get()


class _Prepared:
    """A publisher that was prepared in the trainer's process."""

    def __init__(self, publisher: WeightPublisher) -> None:
        self._publisher = publisher

    async def prepare(self, version: int) -> None:
        """Do nothing."""

    async def publish(self, version: int, engines: Sequence[Engine]) -> Any:
        """Publish to the engines of one shard."""
        return await self._publisher.publish(version, engines)


class _ServedShard(Answering):
    """Answers the collector's calls, inside of the actor."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._shard: _Held | None = None

    def _method(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        return self.open if name == "open" else getattr(self._shard, name)

    async def open(self, parts: Callable[[], ShardParts], *arguments: Any, **named: Any) -> Opened:
        self._shard = _Held(self._name, parts)
        return await self._shard.open(*arguments, **named)

    async def close(self) -> None:
        if self._shard is not None:
            await self._shard.close()


class _Held(LocalShard):
    """The shard inside of the actor, whose weights may come from the collector's process."""

    def __init__(self, name: str, parts: Callable[[], ShardParts]) -> None:
        super().__init__(name, parts)
        self._serving = Served()

    async def begin_update(self, version: int) -> tuple[str, ...] | RefitReport:
        """Pause the engines for a publisher of the collector's process; returns their names."""
        self._serving.scheduler = self.opened()
        return await self._serving.begin_update(version, acknowledge=False)

    async def end_update(self, raised: Raised | None) -> RefitReport:
        """Say that the weights are loaded, or why not."""
        return await self._serving.end_update(raised)
