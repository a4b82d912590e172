"""Modelled time on an event loop's clock, with one timer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from aprilsched.errors import ConfigError, EngineUnreachable

__all__ = ["Pacer"]


class Pacer:
    """Gives the modelled seconds since the first :meth:`start`: loop seconds divided by `scale`.

    :meth:`set_rate` changes the speed. Modelled time never goes back. It stands still while the
    pacer is stopped, and at a rate of 0.

    Raises:
        ConfigError: if `scale` is not positive.
    """

    def __init__(self, name: str, scale: float) -> None:
        if scale <= 0:
            raise ConfigError(f"time_scale is {scale}; give a number above 0.")
        self._name = name
        self._scale = self._usual_scale = scale
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._origin = 0.0
        self._before = 0.0
        self._seen = 0.0

    @property
    def started(self) -> bool:
        return self._loop is not None

    @property
    def scale(self) -> float:
        """Number of loop seconds in a modelled second at the usual speed."""
        return self._usual_scale

    def start(self) -> None:
        """Start or continue, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._origin, self._before = self._loop.time(), self._seen

    def stop(self) -> None:
        self._disarm()
        self._loop = None

    def now(self) -> float:
        """The modelled time now.

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
        self._scale = self._usual_scale / rate if rate else float("inf")
        if self._loop is not None:
            self.start()

    async def sleep(self, seconds: float) -> None:
        """Sleep for modelled seconds at the usual speed."""
        await asyncio.sleep(seconds * self._usual_scale)

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
