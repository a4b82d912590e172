"""A virtual clock for whole coordinator runs: hours of modelled time in seconds.

The event loop is looptime's: real asyncio on the standard selector loop, whose ``time()`` jumps
to the next timer when nothing is ready to run. It was chosen over an own subclass because it also
keeps real sockets and executor threads working (time then waits for them); it is deterministic as
long as neither is used, and makes about 60,000 timer jumps a second.

Beware of code that reads another clock: ``time.monotonic()`` stands still here. The coordinator's
limiter (asyncio-throttle) therefore keeps its log on the loop's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import looptime

__all__ = ["run_virtual"]

_T = TypeVar("_T")

_RESOLUTION = 1e-9  # looptime counts in integers; its default microsecond is a share of a step


def run_virtual(coro: Coroutine[Any, Any, _T], *, idle_timeout: float | None = 60.0) -> _T:
    """Run `coro` like :func:`asyncio.run`, on a clock that starts at 0 and never sleeps.

    Args:
        coro: the program.
        idle_timeout: real seconds to wait for sockets when no timer is left and nothing can
            run, before all tasks fail with ``looptime.IdleTimeoutError`` (a deadlock, mostly);
            None waits for ever.

    Raises:
        RuntimeError: if an event loop runs already in this thread.
    """

    def new_loop() -> asyncio.AbstractEventLoop:
        # noop_cycles=0: looptime's default of 42 empty rounds before each jump makes a run ten
        # times slower, and serves code that relies on wall-clock races.
        loop = looptime.new_event_loop(
            start=0.0, resolution=_RESOLUTION, noop_cycles=0, idle_timeout=idle_timeout
        )
        join_threads = loop.shutdown_default_executor

        async def without_a_bound(timeout: float | None = None) -> None:  # noqa: ASYNC109
            await join_threads()

        # Runner gives the executor's threads five minutes to end (since Python 3.12), which pass
        # at once here, before any thread can have ended.
        loop.shutdown_default_executor = without_a_bound
        return loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(coro)
