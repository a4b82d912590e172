"""Finds silent and slow engines; an engine is judged only by the tokens that arrive from it.

A server that answers ``/health`` may decode nothing, and a paused server is well although no token
comes. So an engine is judged only while it should run and has open requests. Pauses, refits and
sleep do not count.

An engine is *silent* while no token of any open request arrives. Silence is counted by ticks. A
late tick counts for two seconds at most, so that time in which the trainer blocked the event loop
does not count: the tokens of that time are read afterwards. The caller decides how long silence may
last.

An engine is *slow* if its token rate (tokens per request and second, over a window of
:data:`WINDOW` seconds of work) is too low :data:`SLOW_WINDOWS` times in a row. Too low means below
a share of two rates: the engine's usual rate under such a load, and the median of the other
engines' latest rates. So a change of the load, or a slowness of the whole fleet, is not held
against one engine. Usual rates are kept for each octave of the number of running requests, because
the rate is lower under a heavier load. Context that was sent for prefill in the window is allowed
for at :data:`PREFILL_TOKENS_PER_S`.

Invariants: a token costs a look-up and two additions. The usual rates of an engine are kept when it
is lost; otherwise an engine that comes back as slow as before would pass for a usual one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

WINDOW = 15.0
"""Seconds of work in a window. A request at 5 tokens/s, a tenth of 50, still streams a chunk of 64
tokens in it."""
SLOW_WINDOWS = 2
"""Windows in a row with a low rate after which an engine is slow."""
PREFILL_TOKENS_PER_S = 4_000.0
"""Context tokens that any server prefills in a second: about half of what a 70B model does on four
H100. An engine that recomputes everything after the flush of a refit is busy and not hung."""
_LATE_TICK_S = 2.0
"""Seconds that a late tick counts for at most."""
_FRESH_S = 60.0
"""Seconds after which another engine's window is no longer compared with."""
_LEAST_ALLOWANCE = 0.1
"""Least share of a window that prefill must leave for its rate to count."""
_NEW = 0.25
"""Weight of the latest window in the usual rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The token rate of one engine in a window, in tokens per request and second.

    Attributes:
        rate: the measured rate.
        fair: the rate without the time that prefill took; None if prefill took nearly all of it.
        octave: the octave of the mean number of running requests.
    """

    rate: float
    fair: float | None
    octave: int


@dataclass(slots=True, kw_only=True)
class EngineHealth:
    """The token rates of one engine."""

    max_running: int | None = None
    """Number of requests that it runs at the same time, while others wait in it; None if
    unknown."""
    silence: float = 0.0
    """Seconds since the last token."""
    at: float = 0.0
    """The time up to which its work is counted."""
    tokens: int = 0
    """Tokens that arrived in the window."""
    pending_prefill: int = 0
    """Context tokens that were sent for prefill in the window."""
    worked: float = 0.0
    """Seconds of work in the window."""
    busy: float = 0.0
    """Seconds of work in the window, summed over the running requests."""
    rate: float = 0.0
    """The rate of the latest window."""
    rated_at: float | None = None
    """When the latest window ended; None if none has."""
    usual: dict[int, float] = field(default_factory=dict[int, float])
    """Usual rates by octave."""
    slow: int = 0
    """Windows in a row in which the engine was slow."""
    reported: bool = False
    """Whether the engine was reported as slow, while there is no other one to compare it with."""

    def advance(self, now: float, open_requests: int) -> None:
        """Count the work since the last call, with so many open requests; 0 while the engine was
        not meant to run."""
        if open_requests:
            running = open_requests
            if self.max_running is not None:
                running = min(running, max(1, self.max_running))
            seconds = now - self.at
            self.worked += seconds
            self.busy += seconds * running
        self.at = now

    def window(self, now: float) -> Window | None:
        """The window, if it has ended; the next one begins then. None otherwise."""
        if self.worked < WINDOW:
            return None
        rate = self.tokens / self.busy
        left = 1 - self.pending_prefill / PREFILL_TOKENS_PER_S / self.worked
        seen = Window(
            rate=rate,
            fair=rate / left if left > _LEAST_ALLOWANCE else None,
            octave=int(self.busy / self.worked).bit_length(),
        )
        self._begin()
        self.rate, self.rated_at = rate, now
        return seen

    def usual_at(self, octave: int) -> float | None:
        """The usual rate under such a load or a heavier one; None if there is none yet."""
        return max((rate for at, rate in self.usual.items() if at >= octave), default=None)

    def learn(self, window: Window) -> None:
        """Let a window count towards the usual rate."""
        known = self.usual.get(window.octave, window.rate)
        self.usual[window.octave] = known + _NEW * (window.rate - known)

    def forget(self, now: float) -> None:
        """Forget everything but the usual rates: the engine may be another process now."""
        self.silence, self.slow, self.reported, self.rated_at = 0.0, 0, False, None
        self.at = now
        self._begin()

    def _begin(self) -> None:
        self.tokens = self.pending_prefill = 0
        self.worked = self.busy = 0.0


class FleetHealth:
    """The token rates of all engines, by name."""

    def __init__(self) -> None:
        self._engines: dict[str, EngineHealth] = {}
        self._ticked: float | None = None

    def join(self, engine: str, max_running: int | None, now: float) -> None:
        """Begin to judge an engine, which is connected."""
        health = self._engines.setdefault(engine, EngineHealth())
        health.max_running = max_running
        health.forget(now)

    def of(self, engine: str) -> EngineHealth:
        """The token rates of an engine that has joined."""
        return self._engines[engine]

    def tokens_arrived(self, engine: str, tokens: int) -> None:
        """Count tokens that arrived from an engine."""
        health = self._engines[engine]
        health.silence = 0.0
        health.tokens += tokens

    def sent(self, engine: str, context: int, *, alone: bool) -> None:
        """Count context that was sent to an engine; `alone` if it had no other request."""
        health = self._engines[engine]
        health.pending_prefill += context
        if alone:
            health.silence = 0.0

    def tick(self, now: float) -> float:
        """The seconds that count since the last tick."""
        seconds = 0.0 if self._ticked is None else min(now - self._ticked, _LATE_TICK_S)
        self._ticked = now
        return seconds

    def median(self, engines: Iterable[str], now: float) -> float | None:
        """The median of the latest rates of these engines; None if there is no recent one."""
        rates = [
            health.rate
            for health in map(self._engines.__getitem__, engines)
            if health.rated_at is not None and now - health.rated_at <= _FRESH_S
        ]
        return float(np.median(rates)) if rates else None
