"""Waits for work that cannot be stopped half-way: a thread, or calls that are already sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar, cast

from aprilsched.errors import ConfigError
from aprilsched.kernel.engines.base import Engine

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
