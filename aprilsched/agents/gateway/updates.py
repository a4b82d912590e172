"""How weights reach every engine when a client sends them to the gateway.

- :class:`FromDisk` passes the client's path to every engine.
- :class:`FromCalls` takes the buckets of one update from any number of calls, and passes each on to
  all engines. The gateway never opens a bucket.
- :func:`join_group` spreads the ranks of a client's torch.distributed group over the engines.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from aprilsched.agents.gateway.labels import Labels
from aprilsched.agents.serving.calls import BroadcastBody, JoinBody
from aprilsched.errors import ConfigError, EngineRejected, RefitError
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import (
    RefitFromDisk,
    RefitFromGroup,
    RefitFromTensors,
    RefitGroup,
    TensorMeta,
)
from aprilsched.kernel.weights.disk import DiskEngine
from aprilsched.kernel.weights.threads import Takers, call_each

log = logging.getLogger("aprilsched")

_NOT_THERE = 409
"""Status if an engine lacks a method that the call needs."""


@runtime_checkable
class _InBuckets(RefitFromGroup, RefitFromTensors, Protocol):
    """The methods of an engine that takes weights in buckets."""


class Taker(Engine, _InBuckets, Protocol):
    """An engine that takes weights in buckets."""


Bucket = Callable[[Taker], Awaitable[None]]
"""Passes one bucket on to an engine."""


class FromDisk:
    """Lets every engine load a directory, which the gateway itself need not see.

    An engine that rejoins loads it too, unless the gateway sees that its files have changed.

    Args:
        labels: the directory of each version.
    """

    loads_whole = True

    def __init__(self, labels: Labels) -> None:
        self._labels = labels

    def holds(self, version: int) -> bool:
        """Whether the directory of `version` is known."""
        return bool(self._labels.weights(version).folder)

    async def prepare(self, version: int) -> None:
        """Do nothing: the client has written the directory."""

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Load the directory into all engines, in parallel."""
        takers: Takers[DiskEngine] = Takers(
            engines, RefitFromDisk, "load weights from a disk", "send them in buckets"
        )
        weights = self._labels.weights(version)
        path = Path(weights.folder)
        names = ", ".join(engine.name for engine in engines)
        log.info("%s loads weights label=%r folder=%s", names, weights.label, path)

        async def load(engine: DiskEngine) -> None:
            stamp = await asyncio.to_thread(stamp_of, path)
            if stamp != weights.stamp:
                change = "have changed since the update" if stamp else "are missing or unreadable"
                raise ConfigError(
                    f"the files in {path} {change}; send /update_weights_from_disk with a folder "
                    "that is there."
                )
            await engine.update_from_disk(path, version)

        await takers.each(load)
        for name, error in _failed(takers.outcomes).items():
            log.error("%s has not loaded %s: %s", name, path, error)
        return takers.outcomes


def stamp_of(path: str | Path) -> str:
    """Return a digest of names, sizes and times of a directory's files; empty if it is not here."""
    try:
        found = sorted((e.name, e.stat().st_size, e.stat().st_mtime_ns) for e in os.scandir(path))
    except OSError:
        return ""
    return hashlib.sha256(repr(found).encode()).hexdigest()


class FromCalls:
    """Takes the buckets of one update from the calls of a client.

    The update pauses and flushes the engines as every update does, and waits for the buckets while
    the engines are in :meth:`publish`. Each call of :meth:`pass_on` brings one bucket, and
    :meth:`end` marks the last. An engine that fails is left out of the remaining buckets.
    """

    def __init__(self) -> None:
        self.engines: Sequence[Engine] = ()
        """The engines that take the weights; empty until they are paused."""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._complete = asyncio.Event()
        self._over = False
        self._takers: Takers[Taker] = Takers((), _InBuckets, "")

    async def prepare(self, version: int) -> None:
        """Do nothing: the weights come later."""

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Let the client's calls load the weights, and label them `version` at their end."""
        self.engines = engines
        takers: Takers[Taker] = Takers(
            engines, _InBuckets, "take weights in buckets", "load them from a disk"
        )
        self._takers = takers
        try:
            await takers.each(lambda engine: engine.begin_update())
            self._ready.set_result(None)
            await self._complete.wait()
            await takers.each(lambda engine: engine.end_update(version))
        finally:
            self._over = True
        return takers.outcomes

    async def conclude(self) -> None:
        """Release callers that wait to pass on a bucket, if the update ended early."""
        self._over = True
        if not self._ready.done():
            self._ready.set_exception(RefitError("the update ended before it took any weights."))
            self._ready.exception()  # Mark it as retrieved: there may be no waiter.

    async def ready(self) -> None:
        """Wait until the engines are paused and start to take the weights.

        Raises:
            RefitError: if the update ends before.
        """
        await asyncio.shield(self._ready)

    async def pass_on(self, bucket: Bucket) -> Mapping[str, Exception]:
        """Pass a bucket on to the remaining engines; return all failures so far.

        Raises:
            RefitError: if the update is over, or if no engine is left.
        """
        await self.ready()
        if self._over:
            raise RefitError("the update is over, because it took longer than a refit may take.")
        await self._takers.each(bucket)
        failed = _failed(self._takers.outcomes)
        if not self._takers.left:
            self.end()
            raise RefitError(f"no engine has taken the weights: {_causes(failed)}")
        return failed

    def end(self) -> None:
        """Note that the weights are complete."""
        self._complete.set()


def handles(
    serialized: Sequence[str], engines: Sequence[Engine], load_format: str | None
) -> Bucket:
    """Pass on a bucket that comes as one handle per rank.

    A client passes one handle for each rank of all engines, in the order of the engines, or one for
    each rank of a single engine, which all engines open.

    Raises:
        ConfigError: if the number of handles fits neither.
    """
    ranks = {engine.name: engine.capabilities.ranks for engine in engines}
    total, given = sum(ranks.values()), len(serialized)
    parts: dict[str, Sequence[str]] = {}
    if given == total:
        at = 0
        for name, count in ranks.items():
            parts[name] = serialized[at : at + count]
            at += count
    elif set(ranks.values()) == {given}:
        parts = dict.fromkeys(ranks, serialized)
    else:
        raise ConfigError(
            f"serialized_named_tensors has {given} parts, and the engines have {total} ranks in "
            "all; give one for each rank, or one for each rank of a single engine."
        )
    return lambda engine: engine.update_from_tensors(parts[engine.name], load_format=load_format)


def broadcast(body: BroadcastBody) -> Bucket:
    """Pass on a bucket that the client broadcasts in a group.

    Raises:
        ConfigError: if not every tensor has a name, a dtype and a shape.
    """
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise ConfigError(
            f"There are {len(body.names)} names, {len(body.dtypes)} dtypes and "
            f"{len(body.shapes)} shapes; give one of each for every tensor."
        )
    group = body.group_name
    tensors = [
        TensorMeta(name=name, dtype=dtype.removeprefix("torch."), shape=tuple(shape))
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True)
    ]

    async def receive(engine: Taker) -> None:
        if not engine.in_group(group):
            raise EngineRejected(
                engine.name,
                f"is not in the group {group}, perhaps because it was restarted; destroy the group "
                "and init it again.",
                status=_NOT_THERE,
            )
        await engine.receive(tensors, group=group, load_format=body.load_format)

    return receive


def ranks_of(engines: Sequence[Engine]) -> int:
    """Return the number of ranks of all engines."""
    return sum(engine.capabilities.ranks for engine in engines)


async def join_group(body: JoinBody, engines: Sequence[Engine]) -> None:
    """Let all engines join a client's group.

    The first engine takes its ranks from the offset on, and each further engine the next ones.

    Raises:
        ConfigError: if the ranks do not fit into the group, or an engine cannot join any.
        RefitError: if an engine does not join. The others leave again.
    """
    total, offset = ranks_of(engines), body.rank_offset
    if offset < 0 or offset + total != body.world_size:
        raise ConfigError(
            f"The {len(engines)} engines behind the gateway have {total} ranks (tp_size in "
            f"/server_info), so with rank_offset {offset} world_size is {offset + total} and not "
            f"{body.world_size}."
        )
    group = RefitGroup(
        name=body.group_name,
        address=body.master_address,
        port=body.master_port,
        world_size=body.world_size,
        backend=body.backend,
    )
    offsets: dict[str, int] = {}
    for engine in engines:
        if not isinstance(engine, RefitFromGroup):
            raise ConfigError(f"{engine.name} joins no group; load weights from a disk.")
        offsets[engine.name] = offset
        offset += engine.capabilities.ranks
    members = [cast(Taker, engine) for engine in engines]
    failed = _failed(
        await call_each(
            members, lambda engine: engine.join_group(group, rank_offset=offsets[engine.name])
        )
    )
    if failed:
        await leave_group(group.name, [m for m in members if m.name not in failed])
        raise RefitError(f"not every engine has joined the group: {_causes(failed)}")


async def leave_group(name: str, engines: Sequence[Engine]) -> None:
    """Let every engine that is in the group leave it.

    Raises:
        RefitError: if an engine does not.
    """
    members = [
        cast(Taker, engine)
        for engine in engines
        if isinstance(engine, RefitFromGroup) and engine.in_group(name)
    ]
    if failed := _failed(await call_each(members, lambda engine: engine.leave_group(name))):
        raise RefitError(f"not every engine has left the group: {_causes(failed)}")


def _failed(outcomes: Mapping[str, Exception | None]) -> dict[str, Exception]:
    return {name: error for name, error in outcomes.items() if error is not None}


def _causes(failed: Mapping[str, Exception]) -> str:
    return "; ".join(f"{name}: {error}" for name, error in failed.items())
