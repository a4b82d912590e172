"""Packs the trainer's tensors into buckets: few messages, and bounded memory.

- Tensors keep their order; each is in exactly one bucket, and no bucket is empty.
- A bucket holds at most a given number of bytes, unless it holds a single larger tensor.
- An engine gets a bucket as one row of bytes and views each part of it as the tensor's own type.
  torch allows that only where the part begins at a multiple of its element size, so a tensor that
  would begin elsewhere begins the next bucket.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from aprilsched.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Bucket: TypeAlias = "Sequence[tuple[str, Tensor]]"


class Buckets:
    """Packs tensors that arrive one by one.

    Raises:
        ConfigError: if `bucket_bytes` is below 1.
    """

    def __init__(self, bucket_bytes: int) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; give 1 or more.")
        self._limit = bucket_bytes
        self._open: list[tuple[str, Tensor]] = []
        self._bytes = 0

    def add(self, name: str, tensor: Tensor) -> Bucket | None:
        """Add a tensor; return the bucket before it, if that one is now full."""
        size = tensor.numel() * tensor.element_size()
        full = None
        if self._open and (
            self._bytes + size > self._limit or self._bytes % tensor.element_size() != 0
        ):
            full = self.rest()
        self._open.append((name, tensor))
        self._bytes += size
        return full

    def rest(self) -> Bucket | None:
        """Return the open bucket and empty it; None if it is empty already."""
        left, self._open, self._bytes = self._open, [], 0
        return left or None


def check_weights(weights: object) -> None:
    """Refuse weights themselves, where a function that returns them is needed.

    Raises:
        ConfigError: if `weights` is no function.
    """
    if not callable(weights):
        raise ConfigError(
            f"weights is a {type(weights).__name__}; give a function that returns one, because it "
            "is called for each version."
        )


def read_to_the_end(weights: Iterable[object]) -> None:
    """Read what is left, so that every rank of a collective iteration comes to its end."""
    for _ in weights:
        pass


def iter_buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Yield the buckets of `weights`; each is made only when it is asked for."""
    buckets = Buckets(bucket_bytes)
    for name, tensor in weights:
        if (full := buckets.add(name, tensor)) is not None:
            yield full
            del full  # Its memory can be freed before the next tensors are gathered.
    if (last := buckets.rest()) is not None:
        yield last


async def iter_buckets_async(
    weights: AsyncIterable[tuple[str, Tensor]], bucket_bytes: int
) -> AsyncIterator[Bucket]:
    """Like :func:`iter_buckets`, for weights that arrive asynchronously."""
    buckets = Buckets(bucket_bytes)
    async for name, tensor in weights:
        if (full := buckets.add(name, tensor)) is not None:
            yield full
            del full
    if (last := buckets.rest()) is not None:
        yield last
