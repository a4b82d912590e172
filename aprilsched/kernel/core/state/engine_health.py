"""Detection of silent and slow engines, based only on the tokens that arrive from them.

A server that answers ``/health`` may still decode nothing, and a paused server is healthy although
it streams no tokens. So an engine is judged only while it should run and has open requests. Pauses,
refits and sleep do not count.

An engine is *silent* while no token of any open request arrives. Silence is counted in ticks. A
late tick counts for at most two seconds, so time in which the trainer blocks the event loop does
not count: the tokens of that time are read afterwards. The caller decides how long silence may
last.

An engine is *slow* if its token rate (tokens per request and second, over a window of
:data:`WINDOW` seconds of work) is too low :data:`SLOW_WINDOWS` times in a row. Too low means below
a share of two rates: the engine's usual rate under a similar load, and the median of the other
engines' latest rates. So neither a change of the load nor a slowdown of the whole fleet marks one
engine as slow. Usual rates are recorded for each octave of the number of running requests, because
the rate falls under a heavier load. Context sent for prefill in the window is allowed for at
:data:`PREFILL_TOKENS_PER_S`.

Invariants: a token costs a look-up and two additions. The usual rates of an engine are kept when it
is lost; otherwise an engine that rejoins just as slow would set its own standard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

WINDOW = 15.0
"""Seconds of work in a window. Even at 5 tokens/s, a tenth of a usual 50, a request streams a chunk
of 64 tokens in it."""
SLOW_WINDOWS = 2
"""Number of consecutive windows with a low rate after which an engine is slow."""
PREFILL_TOKENS_PER_S = 4_000.0
"""Prefill rate that every server reaches, in tokens per second: about half the rate of a 70B model
on four H100. An engine that recomputes everything after the flush of a refit is busy, not hung."""
_LATE_TICK_S = 2.0
"""Largest number of seconds that a late tick counts for."""
_FRESH_S = 60.0
"""Age in seconds beyond which a window of another engine is not compared."""
_LEAST_ALLOWANCE = 0.1
"""Smallest share of a window that prefill must leave for its rate to count."""
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
    """Largest number of requests that the engine runs at once; others wait in its queue. None if
    unknown."""
    silence: float = 0.0
    """Seconds since the last token."""
    at: float = 0.0
    """Time up to which the work is counted."""
    tokens: int = 0
    """Number of tokens received in the window."""
    pending_prefill: int = 0
    """Number of context tokens sent for prefill in the window."""
    worked: float = 0.0
    """Seconds of work in the window."""
    busy: float = 0.0
    """Seconds of work in the window, summed over the running requests."""
    rate: float = 0.0
    """The rate of the latest window."""
    rated_at: float | None = None
    """End of the latest window; None before the first."""
    usual: dict[int, float] = field(default_factory=dict[int, float])
    """Usual rates by octave."""
    slow: int = 0
    """Number of consecutive slow windows."""
    reported: bool = False
    """Whether the engine is reported as slow while it is the only one and cannot be compared."""

    def advance(self, now: float, open_requests: int) -> None:
        """Count the work of `open_requests` since the last call; 0 if the engine should not run."""
        if open_requests:
            running = open_requests
            if self.max_running is not None:
                running = min(running, max(1, self.max_running))
            seconds = now - self.at
            self.worked += seconds
            self.busy += seconds * running
        self.at = now

    def window(self, now: float) -> Window | None:
        """Return the window and start the next, if it has ended; None otherwise."""
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
        """Return the usual rate under this load or a heavier one; None if unknown."""
        return max((rate for at, rate in self.usual.items() if at >= octave), default=None)

    def learn(self, window: Window) -> None:
        """Add a window to the usual rate."""
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
        """Start to judge a connected engine."""
        health = self._engines.setdefault(engine, EngineHealth())
        health.max_running = max_running
        health.forget(now)

    def of(self, engine: str) -> EngineHealth:
        """Return the token rates of an engine that has joined."""
        return self._engines[engine]

    def tokens_arrived(self, engine: str, tokens: int) -> None:
        """Count tokens that arrived from an engine."""
        health = self._engines[engine]
        health.silence = 0.0
        health.tokens += tokens

    def sent(self, engine: str, context: int, *, alone: bool) -> None:
        """Count context sent to an engine; `alone` if the engine has no other request."""
        health = self._engines[engine]
        health.pending_prefill += context
        if alone:
            health.silence = 0.0

    def tick(self, now: float) -> float:
        """Return the seconds that count since the last tick."""
        seconds = 0.0 if self._ticked is None else min(now - self._ticked, _LATE_TICK_S)
        self._ticked = now
        return seconds

    def median(self, engines: Iterable[str], now: float) -> float | None:
        """Return the median of the engines' latest rates; None if no rate is recent."""
        rates = [
            health.rate
            for health in map(self._engines.__getitem__, engines)
            if health.rated_at is not None and now - health.rated_at <= _FRESH_S
        ]
        return float(np.median(rates)) if rates else None
