"""Time for simulated engines: a virtual clock for whole runs, and modelled time on any loop.

:func:`run_virtual` runs hours of modelled time in seconds. Its event loop is looptime's: real
asyncio on the standard selector loop, whose ``time()`` jumps to the next timer when nothing is
ready to run. Real sockets and executor threads still work on it (time then waits for them), which
a simple subclass would not offer. Runs are deterministic as long as neither is used. It makes about
60,000 timer jumps a second.

Code that reads another clock goes wrong: ``time.monotonic()`` stands still here. The coordinator's
limiter (asyncio-throttle) therefore keeps its log on the loop's clock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from aprilsched.errors import EngineUnreachable
from aprilsched.kernel.values.bounds import ABOVE_0, check_range
from aprilsched.kernel.values.extras import extra

_T = TypeVar("_T")

_RESOLUTION = 1e-9  # looptime counts integers; its default of 1 µs is a notable part of a step


def run_virtual(coro: Coroutine[Any, Any, _T], *, idle_timeout: float | None = 60.0) -> _T:
    """Run `coro` like :func:`asyncio.run`, on a clock that starts at 0 and never sleeps.

    Args:
        coro: the program.
        idle_timeout: real seconds to wait for sockets when no timer is left and nothing can
            run. Then all tasks fail with ``looptime.IdleTimeoutError``; the usual cause is a
            deadlock. None waits forever.

    Raises:
        MissingExtra: if looptime is not installed.
        RuntimeError: if an event loop is already running in this thread.
    """
    with asyncio.Runner(loop_factory=partial(virtual_loop, idle_timeout)) as runner:
        return runner.run(coro)


def virtual_loop(idle_timeout: float | None = 60.0) -> asyncio.AbstractEventLoop:
    """Return a loop for :func:`run_virtual`, or for something else that runs coroutines.

    Args:
        idle_timeout: as for :func:`run_virtual`.

    Raises:
        MissingExtra: if looptime is not installed.
    """
    with extra("sim"):
        import looptime

    # looptime's default of 42 empty cycles before each jump makes a run ten times slower; it
    # serves code with wall-clock races.
    loop = looptime.new_event_loop(
        start=0.0, resolution=_RESOLUTION, noop_cycles=0, idle_timeout=idle_timeout
    )
    join_threads = loop.shutdown_default_executor

    async def without_a_bound(timeout: float | None = None) -> None:  # noqa: ASYNC109
        await join_threads()

    # Since Python 3.12 the Runner gives the executor's threads five minutes to end. They pass at
    # once here, before any thread can have ended.
    loop.shutdown_default_executor = without_a_bound
    return loop


class Pacer:
    """Gives the modelled seconds since the first :meth:`start`: loop seconds divided by `scale`.

    :meth:`set_rate` changes the speed. Modelled time never goes back. It stands still while the
    pacer is stopped, and at a rate of 0.

    Raises:
        ConfigError: if `scale` is not positive.
    """

    def __init__(self, name: str, scale: float) -> None:
        check_range(ABOVE_0, time_scale=scale)
        self._name = name
        self._scale = self.scale = scale
        """Number of loop seconds in a modelled second: now, and at the usual speed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._origin = 0.0
        self._before = 0.0
        self._seen = 0.0

    @property
    def started(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        """Start or continue, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._origin, self._before = self._loop.time(), self._seen

    def stop(self) -> None:
        self._disarm()
        self._loop = None

    def now(self) -> float:
        """Return the modelled time now.

        Raises:
            EngineUnreachable: if the pacer is not started.
        """
        if self._loop is None:
            raise EngineUnreachable(self._name, "not open; enter the scheduler or call open().")
        passed = (self._loop.time() - self._origin) / self._scale
        self._seen = max(self._seen, self._before + passed)
        return self._seen

    def reached(self, when: float) -> float:
        """The modelled time, at least `when`: rounding may make a timer fire slightly early."""
        self._seen = max(self.now(), when)
        return self._seen

    def set_rate(self, rate: float) -> None:
        """Change the speed to `rate` times the usual one; this cancels the timer."""
        if self._loop is not None:
            self.now()
        self._disarm()
        self._scale = self.scale / rate if rate else float("inf")
        if self._loop is not None:
            self.start()

    async def sleep(self, seconds: float) -> None:
        """Sleep for modelled seconds at the usual speed."""
        await asyncio.sleep(seconds * self.scale)

    def arm(self, due: float | None, callback: Callable[[float], None]) -> None:
        """Call ``callback(due)`` at the modelled time `due`; this replaces an earlier timer."""
        self._disarm()
        if due is not None and self._loop is not None and math.isfinite(self._scale):
            when = self._origin + (due - self._before) * self._scale
            self._timer = self._loop.call_at(when, callback, due)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
