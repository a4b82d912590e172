"""Waits for work that cannot be stopped half-way: a thread, or calls that are already sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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

        with suppress(RuntimeError):  # The loop is closed, so nobody waits any more.
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
