"""The protocols of a publisher, which brings new weights or adapters to the engines, and what
publishers share: waiting for work that cannot be stopped half-way, and buckets of tensors.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    runtime_checkable,
)

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import Engine

__all__ = [
    "AdapterPublisher",
    "ConcludingPublisher",
    "RepublishingPublisher",
    "WeightPublisher",
    "WholePublisher",
]


class WeightPublisher(Protocol):
    """Brings a new policy version to a set of engines."""

    async def prepare(self, version: int) -> None:
        """Do what can be done while the engines generate, such as writing files."""
        ...

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Bring `version` to all engines, which are paused, in parallel.

        Returns for each engine's name None, or the error for which it did not take the weights.
        The caller then asks each engine for its version and trusts only that.
        """
        ...


@runtime_checkable
class RepublishingPublisher(WeightPublisher, Protocol):
    """A publisher that can publish a version again, as long as it is the fleet's version.

    With it, an engine that comes back gets that version at once; otherwise it waits for the
    trainer's next version.
    """

    def holds(self, version: int) -> bool:
        """Whether `version` can still be published."""
        ...


@runtime_checkable
class WholePublisher(WeightPublisher, Protocol):
    """A publisher that reports whether an engine takes a version and its label in one call.

    If it does not, a store notes each update before it starts. If the process is killed in the
    middle, the next one uses no engine before another update.
    """

    @property
    def loads_whole(self) -> bool:
        """Whether an engine has either the old version or the new one at any time."""
        ...


@runtime_checkable
class ConcludingPublisher(WeightPublisher, Protocol):
    """A publisher that is notified when a call of ``update_weights()`` is over."""

    async def conclude(self) -> None:
        """End what waits for the update, whatever became of it.

        It is called once for each ``update_weights()`` call, after ``publish()`` has ended, and
        also where nothing was published: the version was refused, ``prepare()`` raised, no
        engine was there.
        """
        ...


@runtime_checkable
class AdapterPublisher(WeightPublisher, Protocol):
    """A publisher whose versions are LoRA adapters, each loaded in addition to those in use.

    `publish` is called while the engines generate. Requests of an older adapter end with that
    adapter; then `retire` is called.
    """

    def adapter_name(self, version: int) -> str:
        """The name of the adapter of `version` on the engines."""
        ...

    async def retire(self, version: int, engine: Engine) -> None:
        """Unload the adapter of `version` from `engine`; no request samples with it."""
        ...


# --- threads -------------------------------------------------------------------------------------

# Waits for work that cannot be stopped half-way: a thread, or calls that are already sent.

P = ParamSpec("P")
T = TypeVar("T")
EngineT = TypeVar("EngineT", bound=Engine)


async def call_each(
    engines: Iterable[EngineT], call: Callable[[EngineT], Awaitable[object]]
) -> dict[str, Exception | None]:
    """Call all engines in parallel; returns None, or the error of the call, for each engine's name.

    One engine's failure must not hide the others' results.
    """

    async def one(engine: EngineT) -> tuple[str, Exception | None]:
        try:
            await call(engine)
        except Exception as error:
            return engine.name, error
        return engine.name, None

    return dict(await asyncio.gather(*map(one, engines)))


class Takers(Generic[EngineT]):
    """The engines of an update that have not failed in it yet.

    Args:
        engines: the engines that the update is for.
        kind: the protocol of what the update needs of an engine.
        lack: what an engine without it does not do, and
        remedy: what to do about that, both for its error.

    Attributes:
        left: the engines that have not failed.
        outcomes: by the name of each engine the error with which it failed, or None.
    """

    def __init__(
        self,
        engines: Iterable[Engine],
        kind: Any,
        lack: str,
        remedy: str = "use another publisher for it",
    ) -> None:
        self.left: list[EngineT] = []
        self.outcomes: dict[str, Exception | None] = {}
        for engine in engines:
            if isinstance(engine, kind):
                self.left.append(cast(EngineT, engine))
                self.outcomes[engine.name] = None
            else:
                why = f"{engine.name} does not {lack}; {remedy}."
                self.outcomes[engine.name] = ConfigError(why)

    async def each(self, call: Callable[[EngineT], Awaitable[object]]) -> None:
        """Call all engines in parallel, and drop those that failed."""
        self.outcomes |= await call_each(self.left, call)
        self.left = [engine for engine in self.left if self.outcomes[engine.name] is None]


async def to_the_end(work: Awaitable[T]) -> T:
    """Await `work`; on a cancellation, first wait for its end and then raise the cancellation."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():  # A second cancellation must not interrupt the work either.
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()  # This marks the exception as seen, so that asyncio does not warn.
        raise


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a thread, to its end; only the caller keeps its result.

    asyncio's own future of a thread refers to itself, so it keeps its result until the next
    garbage collection, which is too long for a bucket of weights.
    """
    result: list[T] = []

    def keep() -> None:
        result.append(work(*args, **kwargs))

    try:
        await to_the_end(asyncio.to_thread(keep))
        return result.pop()
    finally:
        result.clear()


async def in_daemon(work: Callable[[], T], *, name: str) -> T:
    """Run `work` in a daemon thread, which is abandoned on a cancellation.

    The loop waits for its own threads when it ends, and so does the interpreter, however long
    torch takes to give up. Neither waits for a daemon thread.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def tell(result: Callable[[asyncio.Future[T]], None]) -> None:
        def settle() -> None:
            if not ended.done():
                result(ended)

        with suppress(RuntimeError):  # The loop is closed, so no caller waits.
            loop.call_soon_threadsafe(settle)

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            failure = error
            tell(lambda future: future.set_exception(failure))
        else:
            tell(lambda future: future.set_result(value))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await ended


# --- tensor buckets ------------------------------------------------------------------------------

# Packs the trainer's tensors into buckets: few messages, and bounded memory.
#
# - Tensors keep their order; each is in exactly one bucket, and no bucket is empty.
# - A bucket holds at most a given number of bytes, unless it holds a single larger tensor.
# - An engine gets a bucket as one row of bytes and views each part of it as the tensor's own type.
#   torch allows that only if the part starts at a multiple of its element size, so a tensor that
#   would start elsewhere starts the next bucket.

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
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; give 1 or more.")
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
