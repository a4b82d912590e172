"""The health of every engine: is it silent, is it slow? Seen by the tokens that arrive alone.

A server that answers ``/health`` may decode nothing, and one that is paused answers nothing and is
well; what counts is that tokens come while they should: while it is meant to run and has open
requests. Pauses, refits and sleep do not count.

*Silent*: no token of any open request. Counted by ticks, so that a time in which the trainer held
the event loop up does not count: what arrived meanwhile is read after it, and a late tick counts
for two seconds at most. It is the caller who knows how long silence may last.

*Slow*: the tokens per request second, over a window of :data:`WINDOW` seconds of work, are below a
share both of what is usual for the engine under such a load (kept for each octave of the number of
running requests: a lighter load is never held against a heavier one, whose rate is lower) and of
the median of the others' latest windows, :data:`SLOW_WINDOWS` times in a row. So a load that
changed, or a slowness of all, is none of one engine. Context that was sent to be prefilled in the
window is allowed for at :data:`PREFILL_TOKENS_PER_S`.

Invariants: a token costs a look-up and two additions; what is usual for an engine outlives its
loss, or one that comes back as slow as it was would pass for a usual one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

__all__ = [
    "PREFILL_TOKENS_PER_S",
    "SLOW_WINDOWS",
    "WINDOW",
    "EngineHealth",
    "FleetHealth",
    "Window",
]

WINDOW = 15.0
"""Seconds of work: at a tenth of 50 tokens/s a request still streams a chunk of 64 in it."""
SLOW_WINDOWS = 2
PREFILL_TOKENS_PER_S = 4_000.0
"""Context that any server computes in a second, about: half of what a 70B model does on four H100.
An engine that recomputes all that a refit has flushed is busy, not hung."""
_LATE_TICK_S = 2.0
_FRESH_S = 60.0
"""Windows of others that are older say nothing of what is usual now."""
_LEAST_ALLOWANCE = 0.1
"""Of a window, left beside prefill; with less nothing is said."""
_NEW = 0.25
"""Weight of the latest window in what is usual."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What one engine did in a window: tokens per request second.

    Attributes:
        rate: as it was.
        fair: as it would have been without the prefill in it; None where that was nearly all.
        octave: of the mean number of running requests.
    """

    rate: float
    fair: float | None
    octave: int


@dataclass(slots=True, kw_only=True)
class EngineHealth:
    """One engine's."""

    max_running: int | None = None
    """Requests that it runs at the same time; the others wait in it."""
    silence: float = 0.0
    """Seconds without a token."""
    at: float = 0.0
    """Until when its work is counted."""
    tokens: int = 0
    pending_prefill: int = 0
    """Context sent to be prefilled."""
    worked: float = 0.0
    busy: float = 0.0
    """Seconds of the window, and request seconds."""
    rate: float = 0.0
    rated_at: float | None = None
    """Its latest window."""
    usual: dict[int, float] = field(default_factory=dict[int, float])
    """Rates by octave."""
    slow: int = 0
    """Windows in a row in which it was."""
    reported: bool = False
    """It was said that it is slow, though nothing can be done about it."""

    def advance(self, now: float, open_requests: int) -> None:
        """So many requests have been open since the last call; 0 while it was not meant to run."""
        if open_requests:
            running = open_requests
            if self.max_running is not None:
                running = min(running, max(1, self.max_running))
            seconds = now - self.at
            self.worked += seconds
            self.busy += seconds * running
        self.at = now

    def window(self, now: float) -> Window | None:
        """Its window if that has ended, the next one then begins; else None."""
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
        """Its usual rate under such a load, or a heavier one; None if it had none yet."""
        return max((rate for at, rate in self.usual.items() if at >= octave), default=None)

    def learn(self, window: Window) -> None:
        """The window is one as they are."""
        known = self.usual.get(window.octave, window.rate)
        self.usual[window.octave] = known + _NEW * (window.rate - known)

    def forget(self, now: float) -> None:
        """It is another process now, perhaps."""
        self.silence, self.slow, self.reported, self.rated_at = 0.0, 0, False, None
        self.at = now
        self._begin()

    def _begin(self) -> None:
        self.tokens = self.pending_prefill = 0
        self.worked = self.busy = 0.0


class FleetHealth:
    """Of all engines, by name."""

    def __init__(self) -> None:
        self._engines: dict[str, EngineHealth] = {}
        self._ticked: float | None = None

    def join(self, engine: str, max_running: int | None, now: float) -> None:
        """An engine is connected."""
        health = self._engines.setdefault(engine, EngineHealth())
        health.max_running = max_running
        health.forget(now)

    def of(self, engine: str) -> EngineHealth:
        """An engine's, which has joined."""
        return self._engines[engine]

    def tokens_arrived(self, engine: str, tokens: int) -> None:
        """Tokens arrived from it."""
        health = self._engines[engine]
        health.silence = 0.0
        health.tokens += tokens

    def sent(self, engine: str, context: int, *, alone: bool) -> None:
        """It has this context to compute; `alone` if it had no request before."""
        health = self._engines[engine]
        health.pending_prefill += context
        if alone:
            health.silence = 0.0

    def tick(self, now: float) -> float:
        """The seconds since the last tick, as far as they count."""
        seconds = 0.0 if self._ticked is None else min(now - self._ticked, _LATE_TICK_S)
        self._ticked = now
        return seconds

    def median(self, engines: Iterable[str], now: float) -> float | None:
        """Of the latest rates of these engines; None if there is no recent one."""
        rates = [
            health.rate
            for health in map(self._engines.__getitem__, engines)
            if health.rated_at is not None and now - health.rated_at <= _FRESH_S
        ]
        return float(np.median(rates)) if rates else None
