"""Modelled time on an event loop's clock, and one timer on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aprilsched.errors import ConfigError, EngineUnreachable

__all__ = ["Pacer"]


class Pacer:
    """Modelled seconds since the first :meth:`start`: loop seconds divided by `scale`.

    Modelled time never goes back and stands still while stopped.

    Raises:
        ConfigError: if `scale` is not positive.
    """

    def __init__(self, name: str, scale: float) -> None:
        if scale <= 0:
            raise ConfigError(f"time_scale is {scale}; give a number above 0.")
        self._name = name
        self._scale = scale
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._origin = 0.0
        self._seen = 0.0

    @property
    def started(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        """Go on, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time() - self._seen * self._scale

    def stop(self) -> None:
        self._disarm()
        self._loop = None

    def now(self) -> float:
        """Modelled time.

        Raises:
            EngineUnreachable: not started.
        """
        if self._loop is None:
            raise EngineUnreachable(self._name, "not open; enter the scheduler or call open().")
        self._seen = max(self._seen, (self._loop.time() - self._origin) / self._scale)
        return self._seen

    def reached(self, when: float) -> float:
        """Modelled time, at least `when`: rounding may make a timer fire an instant early."""
        self._seen = max(self.now(), when)
        return self._seen

    async def sleep(self, seconds: float) -> None:
        """Sleep for modelled seconds."""
        await asyncio.sleep(seconds * self._scale)

    def arm(self, due: float | None, callback: Callable[[float], None]) -> None:
        """Call ``callback(due)`` at the modelled time `due`, instead of what was set before."""
        self._disarm()
        if due is not None and self._loop is not None:
            when = self._origin + due * self._scale
            self._timer = self._loop.call_at(when, callback, due)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
