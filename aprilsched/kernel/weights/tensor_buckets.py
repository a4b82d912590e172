"""Packs the trainer's tensors into buckets: few messages, and bounded memory.

- Tensors keep their order; each is in exactly one bucket, and no bucket is empty.
- A bucket holds at most a given number of bytes, unless it holds a single larger tensor.
- An engine gets a bucket as one row of bytes and views each part of it as the tensor's own type.
  torch allows that only if the part starts at a multiple of its element size, so a tensor that
  would start elsewhere starts the next bucket.
"""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from aprilsched.errors import ConfigError
from aprilsched.kernel.values.bounds import AT_LEAST_1, check_range
from aprilsched.kernel.weights.threads import in_thread

if TYPE_CHECKING:
    from torch import Tensor


Bucket: TypeAlias = "Sequence[tuple[str, Tensor]]"


class Buckets:
    """Packs tensors that arrive one by one.

    Raises:
        ConfigError: if `bucket_bytes` is below 1.
    """

    def __init__(self, bucket_bytes: int) -> None:
        check_range(AT_LEAST_1, bucket_bytes=bucket_bytes)
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
        ConfigError: if `weights` is not a function.
    """
    if not callable(weights):
        raise ConfigError(
            f"weights is a {type(weights).__name__}; give a function that returns one, because it "
            "is called for each version."
        )


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


_Named: TypeAlias = "Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]]"
Weights: TypeAlias = Callable[[], "_Named | Awaitable[_Named]"]
"""A function that returns named tensors; it and what it returns may be asynchronous."""


class Source:
    """Gives the buckets of one update, from the beginning again where a broadcast is repeated."""

    def __init__(self, weights: Weights, bucket_bytes: int) -> None:
        self._weights = weights
        self._bucket_bytes = bucket_bytes
        self._given: Any = None
        self._buckets: Any = None
        self._kept: Bucket | None = None

    @property
    def started(self) -> bool:
        """Whether a bucket was given that was not put back."""
        return self._buckets is not None and self._kept is None

    def put_back(self, bucket: Bucket) -> None:
        """Take the first bucket back, which was not sent."""
        self._kept = bucket

    async def start_again(self) -> None:
        """Start again with the first bucket."""
        if self.started:
            await self.close()

    async def drain(self) -> None:
        """Read the rest of the weights."""
        self._kept = None
        while await self.next() is not None:
            pass
        await self.close()

    async def next(self) -> Bucket | None:
        """The next bucket; None after the last."""
        kept, self._kept = self._kept, None
        if kept is not None:
            return kept
        if self._buckets is None:
            given = await in_thread(self._weights)
            self._given = await given if inspect.isawaitable(given) else given
            pack = iter_buckets_async if _asynchronous(self._given) else iter_buckets
            self._buckets = pack(self._given, self._bucket_bytes)
        if _asynchronous(self._given):
            return await anext(self._buckets, None)
        return await in_thread(next, self._buckets, None)

    async def close(self) -> None:
        """Close an iterator that was left half-way, so that it frees what it gathered."""
        for part in (self._buckets, self._given):
            if hasattr(part, "aclose"):
                await part.aclose()
            elif inspect.isgenerator(part):
                await in_thread(part.close)
        self._buckets = self._given = self._kept = None


async def read_each(weights: Weights, take: Callable[[str, Tensor], object]) -> None:
    """Call `take` in a thread with each tensor."""
    source = Source(weights, 1)
    try:
        while (bucket := await source.next()) is not None:
            for name, tensor in bucket:
                await in_thread(take, name, tensor)
    finally:
        await source.close()


def _asynchronous(given: object) -> bool:
    return hasattr(given, "__aiter__")


class ReadingPublisher:
    """A publisher that reads the trainer's weights bucket by bucket; the base of those that do.

    Args:
        weights: returns all weights with their names; called again for each version.
        bucket_bytes: bytes of tensors that are sent at a time.
        once: whether the weights are read exactly once for each ``update_weights()``, to their end.

    Raises:
        ConfigError: if `bucket_bytes` is below 1, or `weights` is not a function.
    """

    def __init__(self, weights: Weights, *, bucket_bytes: int, once: bool) -> None:
        check_weights(weights)
        check_range(AT_LEAST_1, bucket_bytes=bucket_bytes)
        self._weights = weights
        self._bucket_bytes = bucket_bytes
        self._once = once
        self._read = False
        """The weights were read in the update under way."""

    @asynccontextmanager
    async def _reading(self) -> AsyncGenerator[Source]:
        """The weights of one update. With `once` they are read to their end, whatever happens."""
        source = Source(self._weights, self._bucket_bytes)
        self._read = True
        try:
            yield source
        finally:
            await (source.drain() if self._once else source.close())

    async def conclude(self) -> None:
        """Read the weights with `once`, if nothing was published: other ranks take part."""
        read, self._read = self._read, False
        if self._once and not read:
            await Source(self._weights, self._bucket_bytes).drain()
