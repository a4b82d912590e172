"""Keeps each version in the trainer's host memory, for engines that take it one after the other.

With rolling refits an engine takes a version when it is free, and the trainer has gone on by then.
So the weights are copied when the version is prepared, while the engines generate. Each engine has
a torch.distributed group with the trainer alone, which lasts from one version to the next: it takes
a version without any other engine, and one that fails breaks no other's group.

- What an engine gets is the copy of its version, whatever the trainer has done with its tensors
  since then.
- A version is kept until a newer one is published, or as long as an engine still takes it. So there
  are two copies in memory at most times, and more where engines are slow.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from aprilsched.engines.base import Engine
from aprilsched.errors import ConfigError
from aprilsched.extras import extra
from aprilsched.weights.distributed import DistributedPublisher, Weights
from aprilsched.weights.tensor_buckets import check_weights
from aprilsched.weights.threads import in_thread

if TYPE_CHECKING:
    from torch import Tensor, device

__all__ = ["RelayPublisher"]


class RelayPublisher:
    """Publishes a copy of the trainer's tensors, over a group for each engine.

    Args:
        weights: returns an iterator, plain or asynchronous, over (name, tensor) of all weights. It
            is called once for each version and read to its end, so it may gather shards in which
            every rank takes part.
        backend: "nccl" between GPUs, "gloo" between CPUs; the engines use the same.
        address: as in :class:`~aprilsched.weights.distributed.DistributedPublisher`.
        bucket_bytes: bytes of tensors that are sent at a time; a larger tensor goes alone.
        device: device from which buckets are sent; None takes the backend's.
        timeout_s: seconds for each step: joining, one bucket, one call of an engine.

    Raises:
        ConfigError: if an argument is out of its range, or `weights` is no function.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        backend: str = "nccl",
        address: str | None = None,
        bucket_bytes: int = 512 * 2**20,
        device: str | device | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        check_weights(weights)
        self._weights = weights
        self._backend = backend
        self._address = address
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._timeout_s = timeout_s
        self._kept: dict[int, Sequence[tuple[str, Tensor]]] = {}
        self._taking: dict[str, int] = {}
        """The version that each engine takes at the moment."""
        self._groups: dict[str, DistributedPublisher] = {}
        self._group_of("")  # It checks the arguments.
        self._groups.clear()

    def holds(self, version: int) -> bool:
        """Whether the copy of `version` is still there."""
        return version in self._kept

    async def prepare(self, version: int) -> None:
        """Copy the weights into host memory, while the engines generate.

        Raises:
            ConfigError: if torch is not installed, or if `weights` yields nothing.
        """
        given = await in_thread(self._weights)
        named = await given if inspect.isawaitable(given) else given
        if hasattr(named, "__aiter__"):
            copies = [_copy(*pair) async for pair in named]  # type: ignore[union-attr]
        else:
            copies = await in_thread(lambda: [_copy(*pair) for pair in named])  # type: ignore[union-attr]
        if not copies:
            raise ConfigError("weights() gave no tensors; it has to give all, each time.")
        self._kept[version] = copies

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Send `version` to the engines, each over its own group.

        Raises:
            ConfigError: if `version` is not kept.
        """
        if version not in self._kept:
            raise ConfigError(f"version {version} was not prepared, or a newer one was published.")
        for engine in engines:
            self._taking[engine.name] = version
        in_use = {version, *self._taking.values()}
        for old in [v for v in self._kept if v < version and v not in in_use]:
            del self._kept[old]
        outcomes = await asyncio.gather(*(self._send(version, engine) for engine in engines))
        return {name: outcome for each in outcomes for name, outcome in each.items()}

    async def aclose(self) -> None:
        """Leave every group, on the engines' side too, and forget all versions."""
        groups = list(self._groups.values())
        self._groups.clear()
        self._kept.clear()
        await asyncio.gather(*(group.aclose() for group in groups))

    async def _send(self, version: int, engine: Engine) -> Mapping[str, Exception | None]:
        try:
            return await self._group_of(engine.name).publish(version, [engine])
        finally:
            self._taking.pop(engine.name, None)

    def _group_of(self, engine: str) -> DistributedPublisher:
        """The publisher of an engine's group, which sends what the engine takes."""

        def copies() -> Iterator[tuple[str, Tensor]]:
            return iter(self._kept[self._taking[engine]])

        if engine not in self._groups:
            self._groups[engine] = DistributedPublisher(
                copies,
                backend=self._backend,
                address=self._address,
                bucket_bytes=self._bucket_bytes,
                device=self._device,
                timeout_s=self._timeout_s,
            )
        return self._groups[engine]


def _copy(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    with extra("torch"):
        import torch
    with torch.no_grad():
        return name, tensor.detach().to("cpu", copy=True)
