"""The ways in which an engine takes weights or adapters, and gives memory back.

Each is a protocol of its own, because no engine has all of them: a publisher asks for the one it
needs and refuses engines without it. In all of them the caller has paused the engine, and the KV
cache is left alone: flushing is a control call of its own (hazard 3).

An engine whose update was begun and did not end well holds neither the old weights nor the new
ones, whatever label it still shows. It says so by raising from ``Engine.version()``
(:class:`~aprilsched.errors.TornWeights`) until a whole update has gone through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

__all__ = [
    "RefitFromDisk",
    "RefitFromGroup",
    "RefitFromSockets",
    "RefitFromTensors",
    "RefitGroup",
    "SleepingEngine",
    "TakesAdapters",
    "TensorMeta",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMeta:
    """What an engine must know of a tensor before it arrives. `dtype` as torch names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitGroup:
    """A torch.distributed group of the trainer (rank 0) and the ranks of all engines.

    Attributes:
        name: of the group, unique on the engine.
        address: where the trainer's rendezvous listens, as the engines reach it.
        world_size: the trainer and all ranks of all engines.
        backend: "gloo" or "nccl".
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str


@runtime_checkable
class RefitFromDisk(Protocol):
    """An engine that loads weights from a directory it can read."""

    async def update_from_disk(self, path: Path, version: int) -> None:
        """Load ``path`` (Hugging Face layout, safetensors) and call it `version`."""
        ...


@runtime_checkable
class _RefitInBuckets(Protocol):
    """An engine that takes weights in parts: begin, any number of parts, end."""

    async def begin_update(self) -> None:
        """Open an update; one that was left open by a failure is closed first."""
        ...

    async def end_update(self, version: int) -> None:
        """All parts are in: the weights are `version` now, and only now."""
        ...


@runtime_checkable
class RefitFromGroup(_RefitInBuckets, Protocol):
    """An engine that receives broadcasts of a torch.distributed group."""

    async def join_group(self, group: RefitGroup, *, rank_offset: int) -> None:
        """Join with its ranks (``Capabilities.ranks`` of them), from `rank_offset` on.

        Answers only when every member has joined.
        """
        ...

    def in_group(self, name: str) -> bool:
        """Whether it is a member; a server that was started anew is not."""
        ...

    async def leave_group(self, name: str) -> None:
        """Leave a group; one that it is not in is ignored."""
        ...

    async def receive(self, tensors: Sequence[TensorMeta], *, group: str) -> None:
        """Take one flattened bucket that rank 0 broadcasts; answers when it is loaded."""
        ...


@runtime_checkable
class RefitFromTensors(_RefitInBuckets, Protocol):
    """An engine on the trainer's machine that opens the trainer's own memory (CUDA IPC)."""

    async def update_from_tensors(self, serialized: Sequence[str], *, load_format: str) -> None:
        """Load one bucket; one serialized handle for each rank of the engine."""
        ...


@runtime_checkable
class RefitFromSockets(Protocol):
    """An engine that takes weights from a checkpoint-engine on its own machine."""

    async def update_from_sockets(self, handles: Mapping[str, str], version: int) -> None:
        """Load from the ZeroMQ socket of each GPU (UUID to path) and call it `version`."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that serves several LoRA adapters of one base model at a time."""

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the adapter in `path` (PEFT layout) beside those that are there. No pause."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; its last request has ended. An unknown one is ignored."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that gives its memory to a trainer on the same GPU and takes it back."""

    async def release(self, tags: Sequence[str]) -> None:
        """Free the memory of `tags` ("kv_cache", "weights", "cuda_graph").

        Only while it is paused with "retract". Requests may wait meanwhile where
        ``Capabilities.release_while_paused``. A released cache is an empty one.
        """
        ...

    async def wake(self, tags: Sequence[str]) -> None:
        """Take the memory of `tags` back; each was released before.

        Only then may the engine be resumed. Weights come back as they were where
        ``Capabilities.keeps_released_weights``; elsewhere they need a refit first.
        """
        ...

    async def released(self) -> frozenset[str]:
        """The tags whose memory is released now; none of a server that was started again."""
        ...
