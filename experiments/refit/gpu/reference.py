"""Makes the same broadcasts with SGLang's own helper for the group, without aprilsched's publisher.

Compared with the publisher's rows, this shows what the publisher costs. By itself, it shows the
throughput of the link if the publisher cannot be used.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from aprilsched.kernel.engines.refit import RefitGroup, TensorMeta
from aprilsched.kernel.weights.tensor_buckets import iter_buckets

__all__ = ["ReferencePublisher"]

_NAME = "reference"


class ReferencePublisher:
    """Publishes to one engine of one rank."""

    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        *,
        backend: str,
        bucket_bytes: int,
        device: str,
    ) -> None:
        self._weights = weights
        self._backend = backend
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._group: Any = None

    async def prepare(self, version: int) -> None:
        """Nothing to do."""

    async def join(self, engine: Any) -> None:
        """Make the group."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        group = RefitGroup(
            name=_NAME, address="127.0.0.1", port=port, world_size=2, backend=self._backend
        )
        joined = asyncio.create_task(engine.join_group(group, rank_offset=1))
        helper = importlib.import_module("sglang.srt.utils.common").init_custom_process_group
        self._group = await asyncio.to_thread(
            helper,
            backend=self._backend,
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=2,
            rank=0,
            group_name=_NAME,
        )
        await joined

    async def publish(self, version: int, engines: Sequence[Any]) -> Mapping[str, Exception | None]:
        """Broadcast all buckets, one after another."""
        (engine,) = engines
        await engine.begin_update()
        for bucket in iter_buckets(self._weights(), self._bucket_bytes):
            tensors = [
                TensorMeta(
                    name=name,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                )
                for name, tensor in bucket
            ]
            received = asyncio.create_task(engine.receive(tensors, group=_NAME))
            await asyncio.to_thread(self._broadcast, [tensor for _, tensor in bucket])
            await received
        await engine.end_update(version)
        return {engine.name: None}

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])
        distributed.broadcast(flat, src=0, group=self._group)
        if flat.is_cuda:
            torch.cuda.synchronize(flat.device)
