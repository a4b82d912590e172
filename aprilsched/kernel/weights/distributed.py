"""Publishes weights through a torch.distributed group: the trainer broadcasts to all engines.

Transport: the trainer is rank 0 of a group that it shares with the ranks of all engines. It joins
the tensors of a bucket into one row of bytes on its device and broadcasts it, over NCCL from GPU
to GPU, or over gloo through the hosts. Only names and shapes go over HTTP.

Requirements: the trainer has torch (and a GPU, for NCCL), all weights under their Hugging Face
names as whole (gathered) tensors, one bucket of them at a time, memory for a second copy of that
bucket, and an address that the engines reach. Of a trainer of several processes, one publishes.

- An engine that fails is left behind and harms no other one: the group is made again without it,
  and everything is sent again from the beginning.
- The next bucket is asked for only after the last one was sent. Gathering is often a collective
  operation too, and two NCCL communicators on one device may wait for each other forever.
- While the engines load a bucket, the next one is read and joined. It is announced only when every
  engine has answered for the last one: a broadcast can end on the trainer's side before a distant
  engine has even received the call, and two announcements on their way to an engine may overtake
  each other. Bytes that were loaded under the names of another bucket would go unnoticed.
- Every wait is bounded. A cancelled publish drops the trainer's side at once, so that no engine
  waits for a broadcast any longer. The one exception is a gloo broadcast that hangs in an engine:
  it is dropped after `timeout_s`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from aprilsched.errors import ConfigError, EngineError, EngineRejected
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.refit import RefitFromGroup, TensorMeta
from aprilsched.kernel.values.bounds import ABOVE_0, PORT, check_range
from aprilsched.kernel.values.extras import extra
from aprilsched.kernel.weights.collective import BrokenOff, GroupEngine, each, leave, together
from aprilsched.kernel.weights.process_group import DEVICES, TrainerGroup, address_towards
from aprilsched.kernel.weights.tensor_buckets import Bucket, ReadingPublisher, Source, Weights
from aprilsched.kernel.weights.threads import Takers, in_thread, to_the_end

if TYPE_CHECKING:
    from torch import Tensor, device

_log = logging.getLogger(__name__)

_UNEXPLAINED = 2
"""Number of broadcasts that may break off although every engine answers."""


class DistributedPublisher(ReadingPublisher):
    """Publishes tensors by broadcast, over a group that lasts from one version to the next.

    Args:
        weights: returns an iterator, plain or asynchronous, over (name, tensor) of all weights. It
            is called again for each broadcast, also when a failed one is repeated, so it must be
            able to start from the beginning, unless `once` is set. A plain one runs in a thread.
        backend: "nccl" between GPUs, "gloo" between CPUs; the engines use the same.
        address: address of this machine, as the engines reach it. None takes the address of the
            interface towards them, or loopback if they are on this machine. An SGLang server that
            does not reach it waits for half an hour without an answer.
        port: port at which the group's members meet; 0 for any free one.
        bucket_bytes: bytes of tensors that are broadcast at a time; a larger tensor goes alone.
        group: prefix of the group's name.
        device: device on which the buckets are joined. None takes the device of the first tensor,
            if the backend can send from it.
        timeout_s: seconds for each step: joining, one bucket, one call of an engine.
        once: True if the weights of a version can be read only once, or if every rank of the
            trainer takes part in the iteration, as in gathering shards. `weights` is then called
            exactly once for each ``update_weights()`` call and read to its end, whatever becomes
            of the update, so that no other rank waits. A broadcast that breaks off cannot be
            repeated: the engines that it has started with wait for the next ``update_weights()``.

    Raises:
        ConfigError: if an argument is out of its range, or `weights` is not a function.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        backend: str = "nccl",
        address: str | None = None,
        port: int = 0,
        bucket_bytes: int = 512 * 2**20,
        group: str = "aprilsched",
        device: str | device | None = None,
        timeout_s: float = 120.0,
        once: bool = False,
    ) -> None:
        super().__init__(weights, bucket_bytes=bucket_bytes, once=once)
        if backend not in DEVICES:
            raise ConfigError(f"backend is {backend!r}; give one of {', '.join(sorted(DEVICES))}.")
        check_range(PORT, port=port)
        check_range(ABOVE_0, timeout_s=timeout_s)
        self._backend = backend
        self._address = address
        self._port = port
        self._device = device
        self._timeout_s = timeout_s
        # An engine keeps the groups of a trainer that was killed, and refuses their names.
        self._prefix = f"{group}-{secrets.token_hex(4)}"
        self._made = 0
        self._group: TrainerGroup | None = None
        self._name = ""
        self._members: list[GroupEngine] = []

    async def prepare(self, version: int) -> None:
        """Import torch, which takes seconds, while the engines still generate.

        Raises:
            ConfigError: if torch is not installed, or lacks the backend.
        """
        await in_thread(_check_torch, self._backend)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Broadcast every bucket to all engines, and label the weights `version`.

        Raises:
            ConfigError: if torch is not installed, the address is not this machine's, or
                `weights` yields nothing.
        """
        takers: Takers[GroupEngine] = Takers(engines, RefitFromGroup, "join a group")
        if takers.left:
            await in_thread(_check_torch, self._backend)
            async with self._reading() as source:
                try:
                    await self._until_whole(version, takers, source)
                except BaseException:
                    # Also a cancellation: engines may wait for a broadcast, and must not while the
                    # rest of the weights is read for the other ranks.
                    self.close()
                    raise
        return takers.outcomes

    async def aclose(self) -> None:
        """Leave the group, on the engines' side too. A later publish makes a new group."""
        members, self._members = self._members, []
        # The trainer's side comes first: this frees an engine that waits in the group.
        self.close()
        if members:
            await leave(members, self._name)

    def close(self) -> None:
        """Leave the group on the trainer's side, at once; the engines notice it."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    async def _until_whole(self, version: int, takers: Takers[GroupEngine], source: Source) -> None:
        """Broadcast, and again without those that it broke off for, until it reaches the others."""
        engines: list[GroupEngine] = takers.left
        outcomes = takers.outcomes
        unexplained_left = _UNEXPLAINED
        while engines:
            try:
                outcomes.update(await self._broadcast(version, engines, source))
                return
            except BrokenOff as broken:
                self.close()
                _log.warning("the broadcast of version %d broke off: %s", version, broken)
                outcomes.update((name, broken.failures[name]) for name in broken.behind)
                engines = [engine for engine in engines if engine.name not in broken.behind]
                # An engine that did not answer is not asked to leave: that call would time out.
                self._members = [
                    engine
                    for engine in self._members
                    if isinstance(broken.failures.get(engine.name), EngineRejected | None)
                ]
                unexplained_left -= not broken.behind
                why = ""
                if self._once and source.started:
                    why = (
                        f"the broadcast to it broke off ({broken}), and weights with once=True are "
                        "not read again; call update_weights() again."
                    )
                elif unexplained_left == 0:
                    why = (
                        f"the broadcast to it broke off twice ({broken}); check the network "
                        "between the trainer and the engines."
                    )
                if why:
                    outcomes.update((each.name, EngineError(each.name, why)) for each in engines)
                    return
                await source.start_again()

    async def _broadcast(
        self, version: int, engines: Sequence[GroupEngine], source: Source
    ) -> Mapping[str, Exception]:
        """Broadcast all weights from the beginning; return the failures at the final step."""
        group = await self._join(engines)
        # The first bucket comes before any engine starts, so that a caller's mistake harms no
        # engine.
        bucket = await source.next()
        if bucket is None:
            raise ConfigError("weights() gave no tensors; it has to give all, each time.")
        failures = await self._each(engines, lambda engine: engine.begin_update())
        if failures:
            source.put_back(bucket)
            raise BrokenOff("an engine did not start the update", failures, set(failures))
        sending: list[_Row] | None = [await self._row_of(bucket)]
        bucket = None  # Only one bucket takes memory.
        while sending is not None:
            sending = await self._hand_over(group, sending, engines, source)
        return await self._each(engines, lambda engine: engine.end_update(version))

    async def _hand_over(
        self,
        group: TrainerGroup,
        sending: list[_Row],
        engines: Sequence[GroupEngine],
        source: Source,
    ) -> list[_Row] | None:
        """Broadcast the row in `sending`; return the next one in a list, or None after the last.

        The row is taken out of the list, so that its memory is free for the next one as soon as it
        is sent.
        """
        metas = sending[0].metas
        reading: list[asyncio.Task[list[_Row] | None]] = []

        async def read() -> list[_Row] | None:
            bucket = await source.next()
            return None if bucket is None else [await self._row_of(bucket)]

        def read_next() -> None:
            reading.append(asyncio.create_task(read()))

        try:
            await together(
                group,
                lambda: group.broadcast(sending.pop().flat),
                engines,
                lambda engine: engine.receive(metas, group=group.refit.name),
                timeout_s=self._timeout_s,
                own_ended=read_next,
            )
        except BrokenOff:
            for task in reading:
                await task  # Report a mistake in the weights before a failure of engines.
            raise
        except BaseException:
            for task in reading:
                task.cancel()
            await to_the_end(asyncio.gather(*reading, return_exceptions=True))
            raise
        # It succeeds only after the trainer's side has, so the next bucket is being read.
        return await reading[0]

    async def _row_of(self, bucket: Bucket) -> _Row:
        return await in_thread(_row_of, bucket, self._device, DEVICES[self._backend])

    async def _join(self, engines: Sequence[GroupEngine]) -> TrainerGroup:
        """The group of exactly these engines: the present one, or a new one."""
        whole = all(engine.in_group(self._name) for engine in engines)
        if self._group is not None and self._members == list(engines) and whole:
            return self._group
        await self.aclose()
        self._made += 1
        self._name = f"{self._prefix}-{self._made}"
        offsets = rank_offsets([engine.capabilities.ranks for engine in engines])
        address = self._address or address_towards(engine.name for engine in engines)
        group = self._group = TrainerGroup(
            self._name,
            address=address,
            port=self._port,
            world_size=offsets[-1],
            backend=self._backend,
            timeout_s=self._timeout_s,
        )
        self._members = list(engines)
        offset_of = {id(engine): at for engine, at in zip(engines, offsets, strict=False)}
        await together(
            group,
            group.join,
            engines,
            lambda engine: engine.join_group(group.refit, rank_offset=offset_of[id(engine)]),
            timeout_s=self._timeout_s,
        )
        return group

    async def _each(
        self, engines: Sequence[GroupEngine], call: Callable[[GroupEngine], Awaitable[None]]
    ) -> Mapping[str, Exception]:
        return await each(engines, call, timeout_s=self._timeout_s)


def rank_offsets(ranks: Sequence[int]) -> list[int]:
    """The first rank of each engine (rank 0 is the trainer), followed by the group's size."""
    return list(accumulate(ranks, initial=1))


class _Row(NamedTuple):
    """A bucket as it is sent.

    Attributes:
        metas: what the engines must know of its tensors.
        flat: all bytes in the order of the tensors, without gaps: SGLang's layout.
    """

    metas: list[TensorMeta]
    flat: Tensor


def _row_of(bucket: Bucket, where: str | device | None, kind: str) -> _Row:
    import torch

    metas = [
        TensorMeta(
            name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape)
        )
        for name, tensor in bucket
    ]
    first = bucket[0][1].device
    target = torch.device(where) if where is not None else first if first.type == kind else kind
    with torch.no_grad():
        parts = [
            tensor.detach().to(target).contiguous().reshape(-1).view(torch.uint8)
            for _, tensor in bucket
        ]
        return _Row(metas, torch.cat(parts))


def _check_torch(backend: str) -> None:
    with extra("torch"):
        from torch import distributed
    if not getattr(distributed, f"is_{backend}_available")():
        raise ConfigError(f"This torch has no {backend}; install one that has, or set backend.")
