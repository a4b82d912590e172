"""Protocols for the ways in which an engine takes weights or adapters and releases its memory.

Each way is a separate protocol, because no engine has all of them: a publisher requires the one
that it needs and refuses engines without it. All of them require that the caller has paused the
engine, and leave the KV cache alone: flushing is a separate control call (hazard 3).

An engine whose update was started and did not succeed has inconsistent weights: neither the old
ones nor the new ones, whatever version it still reports. Its ``Engine.version()`` raises
:class:`~aprilsched.errors.InconsistentWeights` until a complete update has succeeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMeta:
    """What an engine must know of a tensor before it arrives; `dtype` is torch's name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RefitGroup:
    """A torch.distributed group of the trainer (rank 0) and the ranks of all engines.

    Attributes:
        name: name of the group, unique on the engine.
        address: address of the trainer's rendezvous, as the engines reach it.
        world_size: number of ranks: the trainer's one, plus the ranks of all engines.
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
        """Load ``path`` (Hugging Face layout, safetensors) and report it as `version`."""
        ...


@runtime_checkable
class _RefitInBuckets(Protocol):
    """An engine that takes weights in parts: one start, any number of parts, one end."""

    async def begin_update(self) -> None:
        """Start an update; an update that a failure left open is closed first."""
        ...

    async def end_update(self, version: int) -> None:
        """End the update: all parts have arrived, and the weights are `version` from now on."""
        ...


@runtime_checkable
class RefitFromGroup(_RefitInBuckets, Protocol):
    """An engine that receives broadcasts of a torch.distributed group."""

    async def join_group(self, group: RefitGroup, *, rank_offset: int) -> None:
        """Join the group with the engine's ``Capabilities.ranks`` ranks, from `rank_offset` on.

        The call returns only when every member has joined.
        """
        ...

    def in_group(self, name: str) -> bool:
        """Whether the engine is a member; a server that was restarted is not."""
        ...

    async def leave_group(self, name: str) -> None:
        """Leave a group; does nothing if the engine is not in it."""
        ...

    async def receive(
        self,
        tensors: Sequence[TensorMeta],
        *,
        group: str,
        load_format: str | None = "flattened_bucket",
    ) -> None:
        """Receive one bucket that rank 0 broadcasts, and return when it is loaded.

        `load_format` is the format of the transfer: "flattened_bucket" is one row of bytes, and
        None is one broadcast for each tensor.
        """
        ...


@runtime_checkable
class RefitFromTensors(_RefitInBuckets, Protocol):
    """An engine on the trainer's machine that opens the trainer's own memory (CUDA IPC)."""

    async def update_from_tensors(
        self, serialized: Sequence[str], *, load_format: str | None
    ) -> None:
        """Load one bucket; `serialized` has one handle for each rank of the engine."""
        ...


@runtime_checkable
class RefitByTransfer(_RefitInBuckets, Protocol):
    """An engine that takes weights by vLLM's own transfer, whose messages pass through unread."""

    async def join_transfer(self, group: int, info: Mapping[str, Any]) -> None:
        """Get ready to receive; the engine remembers the number of the `group`."""
        ...

    def in_transfer(self, group: int) -> bool:
        """Whether the engine is a member of the group; a server that was restarted is not."""
        ...

    async def receive_transfer(self, info: object) -> None:
        """Receive and load the tensors that are sent; return when they are loaded."""
        ...


@runtime_checkable
class RefitFromSockets(Protocol):
    """An engine that takes weights from a checkpoint-engine on its own machine."""

    async def update_from_sockets(self, handles: Mapping[str, str], version: int) -> None:
        """Load from the ZeroMQ socket of each GPU (UUID to path) and report it as `version`."""
        ...


@runtime_checkable
class RefitElsewhere(Protocol):
    """An engine into which another client loads weights, by calls that this object does not see."""

    def expect_weights(self) -> None:
        """Mark the weights as inconsistent, because another client may start loading some."""
        ...

    async def accept_weights(self, version: int, *, label: bool = False) -> None:
        """Mark the weights as `version`, which another client has loaded completely.

        With `label`, the engine is set to report them as `version`. Otherwise it must report that
        already.

        Raises:
            EngineRejected: (409) if the engine reports another version.
            EngineRestarted: if the process that answers is not the one that was opened.
        """
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that serves several LoRA adapters of one base model at a time."""

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load the adapter in `path` (PEFT layout) in addition to the others, without a pause."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter after its last request has ended. An unknown name is ignored."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """An engine that can release its memory to a trainer on the same GPU and take it back."""

    async def release(self, tags: Sequence[str]) -> None:
        """Free the memory of `tags` ("kv_cache", "weights", "cuda_graph").

        It is allowed only while the engine is paused with "retract". Requests may wait in that
        pause where ``Capabilities.release_while_paused``. Releasing a cache empties it.
        """
        ...

    async def wake(self, tags: Sequence[str]) -> None:
        """Take the memory of `tags` back; each of them must be released.

        The engine may be resumed only afterwards. The weights are unchanged where
        ``Capabilities.keeps_released_weights``; elsewhere they need a refit first.
        """
        ...

    async def released(self) -> frozenset[str]:
        """Ask which tags are released now; a server that was restarted has released none."""
        ...
