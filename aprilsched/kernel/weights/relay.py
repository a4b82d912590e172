"""Keeps each version in the trainer's host memory, for engines that take it one after the other.

With rolling refits an engine takes a version when it is free, and the trainer has moved on by then.
So the weights are copied when the version is prepared, while the engines generate. Another
publisher sends the copy to one engine at a time: `DistributedPublisher` over a torch.distributed
group of this engine and the trainer, which lasts from one version to the next, or `TensorPublisher`
by handles of GPU memory, to which the copy is moved bucket by bucket. An engine takes a version
without any other one, and one that fails harms no other.

- What an engine gets is the copy of its version, whatever the trainer has done with its tensors
  since then.
- A version is kept until a newer one is published, or as long as an engine still takes it. So there
  are two copies in memory at most times, and more where engines are slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.values.extras import extra
from aprilsched.kernel.weights.distributed import DistributedPublisher, Weights
from aprilsched.kernel.weights.tensor import TensorPublisher
from aprilsched.kernel.weights.tensor_buckets import check_weights, read_each

if TYPE_CHECKING:
    from torch import Tensor, device


class RelayPublisher:
    """Publishes a copy of the trainer's tensors, to each engine when it is free.

    Args:
        weights: returns an iterator, plain or asynchronous, over (name, tensor) of all weights. It
            is called once for each version and read to its end, so it may gather shards in which
            every rank takes part.
        through: the publisher that sends a copy to one engine.
        device: device from which buckets are sent; None takes the one of `through`'s backend, and
            "cuda" for TensorPublisher.
        settings: other settings of `through`, such as ``backend="gloo"`` or ``bucket_bytes``.

    Raises:
        ConfigError: if a setting is out of its range, or `weights` is not a function.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        through: type[DistributedPublisher] | type[TensorPublisher] = DistributedPublisher,
        device: str | device | None = None,
        **settings: Any,
    ) -> None:
        check_weights(weights)
        self._weights = weights
        self._through: type[Any] = through
        self._device = device
        self._settings = settings
        self._kept: dict[int, Sequence[tuple[str, Tensor]]] = {}
        self._taking: dict[str, int] = {}
        """The version that each engine takes at the moment."""
        self._senders: dict[str, DistributedPublisher | TensorPublisher] = {}
        self._first = self._sender("")
        """A sender to no engine: it checks the settings, and imports what sending needs."""

    def holds(self, version: int) -> bool:
        """Whether the copy of `version` is still there."""
        return version in self._kept

    async def prepare(self, version: int) -> None:
        """Copy the weights into host memory, while the engines generate.

        Raises:
            ConfigError: if torch, or what `through` needs, is not installed, or if `weights`
                yields nothing.
        """
        await self._first.prepare(version)
        copies: list[tuple[str, Tensor]] = []
        await read_each(self._weights, lambda name, tensor: copies.append(_copy(name, tensor)))
        if not copies:
            raise ConfigError("weights() gave no tensors; it has to give all, each time.")
        self._kept[version] = copies

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Send `version` to the engines, to each on its own.

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
        senders = list(self._senders.values())
        self._senders.clear()
        self._kept.clear()
        await asyncio.gather(*(s.aclose() for s in senders if isinstance(s, DistributedPublisher)))

    async def _send(self, version: int, engine: Engine) -> Mapping[str, Exception | None]:
        sender = self._senders.get(engine.name)
        if sender is None:
            sender = self._senders[engine.name] = self._sender(engine.name)
        try:
            return await sender.publish(version, [engine])
        finally:
            self._taking.pop(engine.name, None)

    def _sender(self, engine: str) -> DistributedPublisher | TensorPublisher:
        """A publisher of the copy that the engine takes."""

        def copies() -> Iterator[tuple[str, Tensor]]:
            return iter(self._kept[self._taking[engine]])

        def on_device() -> Iterator[tuple[str, Tensor]]:
            return ((name, copy.to(self._device or "cuda")) for name, copy in copies())

        if issubclass(self._through, TensorPublisher):
            return self._through(on_device, **self._settings)
        return self._through(copies, device=self._device, **self._settings)


def _copy(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    with extra("torch"):
        import torch
    with torch.no_grad():
        return name, tensor.detach().to("cpu", copy=True)
