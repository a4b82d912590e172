"""Waiting for work that cannot be stopped half-way: a thread, or calls already sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

__all__ = ["in_daemon", "in_thread", "to_the_end"]

P = ParamSpec("P")
T = TypeVar("T")


async def to_the_end(work: Awaitable[T]) -> T:
    """Await `work`. When cancelled, let it end first and be cancelled then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():  # a second cancellation does not make the work safe to leave
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()  # looked at, so that nobody warns that it was not
        raise


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work` in a thread, to its end. Its result belongs to the caller alone.

    asyncio's own future of a thread refers to itself, and so keeps its result until the next
    collection of garbage: for a bucket of weights that is too long.
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
    """Run `work` in a thread that is left alone when this is cancelled.

    A daemon, and not one of the loop's threads: the loop waits for its own when it ends, and the
    interpreter too, however long torch takes to give up.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def tell(result: Callable[[asyncio.Future[T]], None]) -> None:
        def settle() -> None:
            if not ended.done():
                result(ended)

        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
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
