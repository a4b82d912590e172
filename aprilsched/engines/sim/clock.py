"""A virtual clock for whole coordinator runs: hours of modelled time pass in seconds.

The event loop is looptime's: real asyncio on the standard selector loop, whose ``time()`` jumps
to the next timer when nothing is ready to run. Real sockets and executor threads still work on it
(time then waits for them), which a simple subclass would not offer. Runs are deterministic as long
as neither is used. It makes about 60,000 timer jumps a second.

Code that reads another clock goes wrong: ``time.monotonic()`` stands still here. The coordinator's
limiter (asyncio-throttle) therefore keeps its log on the loop's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aprilsched.extras import extra

__all__ = ["run_virtual"]

_T = TypeVar("_T")

_RESOLUTION = 1e-9  # looptime counts integers; its default of 1 µs is a notable part of a step


def run_virtual(coro: Coroutine[Any, Any, _T], *, idle_timeout: float | None = 60.0) -> _T:
    """Run `coro` like :func:`asyncio.run`, on a clock that starts at 0 and never sleeps.

    Args:
        coro: the program.
        idle_timeout: real seconds to wait for sockets when no timer is left and nothing can
            run. After them all tasks fail with ``looptime.IdleTimeoutError``, mostly because of
            a deadlock. None waits for ever.

    Raises:
        MissingExtra: if looptime is not installed.
        RuntimeError: if an event loop is already running in this thread.
    """
    with extra("sim"):
        import looptime

    def new_loop() -> asyncio.AbstractEventLoop:
        # looptime's default of 42 empty cycles before each jump makes a run ten times slower; it
        # serves code with wall-clock races.
        loop = looptime.new_event_loop(
            start=0.0, resolution=_RESOLUTION, noop_cycles=0, idle_timeout=idle_timeout
        )
        join_threads = loop.shutdown_default_executor

        async def without_a_bound(timeout: float | None = None) -> None:  # noqa: ASYNC109
            await join_threads()

        # Since Python 3.12 the Runner gives the executor's threads five minutes to end. They
        # pass at once here, before any thread can have ended.
        loop.shutdown_default_executor = without_a_bound
        return loop

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(coro)
