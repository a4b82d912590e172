"""Learns the engines' step times from a run, for the planner's model.

Tokens are seen when a chunk arrives, not when they are sampled. So StepTimes times each request
from one of its chunks to the next: the tokens of a chunk are the decode steps of that time. (The
tokens of all requests divided by the mean number of requests would be wrong by a third: the
requests of a wave stream in step, so a window has about one chunk of each more or less at its
ends.) The first chunk of a request after it was sent, or after a pause, is not timed. It shows that
the context was prefilled: until then the request does not decode, and then a prefill pass counts.
After an update, contexts are prefilled for seconds among the decode steps. While more than half of
them are unread, no window is open. (When these passes were ignored, the fit for a mixture of
experts gave 69 ns for a context token instead of the true 34 ns.) A window ends with a pause, or
after `WINDOW` seconds. The remaining errors average out over many windows, and outlier windows have
little weight (:mod:`~aprilsched.planning.step_times.online`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.facts import Fact
from aprilsched.kernel.shell.listener import TokenChunks
from aprilsched.planning import Planner
from aprilsched.planning.step_times.online import Observation, OnlineFit

WINDOW = 2.0
"""Length of a window in seconds. It has a few hundred decode steps, in which each request streams a
few chunks. In a longer window the batch shrinks so much that the terms of a step's time cannot be
distinguished: windows of 10 s found a tenth of a doubling of t0, windows of 2 s four fifths."""
_LEAST_TOKENS = 256
"""A window with fewer timed tokens is ignored."""
_BURST = 2e-3
"""Longest interval of one prefill pass, in seconds: requests count as one pass if they are sent to
an engine within it, and their first tokens arrive within it."""
_MANY = 1 / 2
"""Largest share of an engine's requests whose contexts may be unread in a window. With an eighth, a
whole batch passed without a window when a full KV pool let only a few contexts be read at a time.
"""


@dataclass(slots=True, kw_only=True)
class _Window:
    """The activity of one engine in a window; seconds are on the run's clock."""

    started_at: float
    at: float
    running: dict[int, int] = field(default_factory=dict[int, int])
    """Number of context tokens of each open attempt, by request."""
    held: int = 0
    """Number of context tokens of all open attempts."""
    running_time: float = 0.0
    """Integral of the number of open attempts over time."""
    held_time: float = 0.0
    """Integral of `held` over time."""
    since: dict[int, float] = field(default_factory=dict[int, float])
    """Time of the last chunk of each request that is timed."""
    timed: float = 0.0
    """Sum over the timed requests of the seconds between their chunks."""
    tokens: int = 0
    """Number of tokens that arrived in the `timed` seconds."""
    passes: int = 0
    """Number of prefill passes."""
    prefilled: int = 0
    """Number of tokens that the prefill passes computed."""
    unread: dict[int, tuple[float, int]] = field(default_factory=dict[int, tuple[float, int]])
    """When each request was sent that has not sent a chunk since, or since its KV was dropped, and
    the tokens of its context; 0 after a pause, because then its next chunk does not tell when it
    was read."""
    queued: int = 0
    """Number of the unread requests that were sent, and do not decode yet."""
    queued_tokens: int = 0
    """Number of tokens of their contexts."""
    read: tuple[float, float] = (-1.0, -1.0)
    """When the request with the latest first chunk was sent, and when that came."""
    keeps: bool = False
    """Whether the present or last pause keeps the KV."""

    def advance(self, now: float) -> None:
        seconds = now - self.at
        self.running_time += (len(self.running) - self.queued) * seconds
        self.held_time += (self.held - self.queued_tokens) * seconds
        self.at = now

    def restart(self, now: float) -> None:
        self.started_at = self.at = now
        self.running_time = self.held_time = self.timed = 0.0
        self.tokens = self.passes = self.prefilled = 0

    @property
    def mostly_unread(self) -> bool:
        """Whether too many contexts are unread for a window."""
        return len(self.unread) > _MANY * len(self.running)

    def send(self, key: int, context: int, now: float) -> None:
        """Count a request that is sent."""
        self.running[key] = context
        self.unread[key] = (now, context)
        self.held += context
        self.queued += 1
        self.queued_tokens += context

    def read_one(self, key: int, now: float) -> tuple[float, int]:
        """Note that a context is read or no longer wanted; return its entry in `unread`."""
        sent, context = self.unread.pop(key, (now, 0))
        self.queued -= context > 0
        self.queued_tokens -= context
        return sent, context

    def arrived(self, key: int, tokens: int, now: float) -> None:
        """Count a chunk of a request."""
        sent, context = self.read_one(key, now)
        if not self.since or self.mostly_unread:
            # Before the first chunk the engine was idle, was prefilling, or did something unknown.
            self.restart(now)
            self.since.clear()
        elif key in self.since:
            self.timed += now - self.since[key]
            self.tokens += tokens
        elif context:
            self.prefilled += context
            self.passes += sent - self.read[0] > _BURST or now - self.read[1] > _BURST
        if context:
            self.read = (sent, now)
        self.since[key] = now

    def go_on(self, now: float) -> None:
        """End a pause."""
        self.since.clear()
        if not self.keeps:
            self.unread = {key: self.unread.get(key, (now, 0)) for key in self.running}

    def observation(self) -> Observation | None:
        seconds = self.at - self.started_at
        if seconds <= 0 or not self.running_time or self.tokens < _LEAST_TOKENS:
            return None
        return Observation(
            running=self.running_time / seconds,
            kv_tokens=self.held_time / seconds,
            seconds_per_step=self.timed / self.tokens,
            seconds=seconds,
            prefill_passes=self.passes,
            prefilled_tokens=self.prefilled,
        )


class StepTimes:
    """A listener that fits the planner's step-time model to the run."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._fit = OnlineFit(planner.model)
        self._fitted_at = -math.inf
        self._engines: dict[str, _Window] = {}
        self._where: dict[int, str] = {}
        """Engine of each request that has an open attempt."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            match fact:
                case of.AttemptSent():
                    self._send(fact, now)
                case of.TokensReceived():
                    self._tokens(fact, now)
                case of.AttemptEnded():
                    self._end(fact, now)
                case of.EngineModeChanged(finish="pausing"):
                    window = self._window(fact.engine, now)
                    self._stop(window, now)
                    window.keeps = fact.pause == "in_place"
                case of.EngineModeChanged(start="continuing"):
                    self._window(fact.engine, now).go_on(now)
                case of.EngineLost():
                    self._lose(fact.engine)
                case _:
                    pass

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        for fact, at in chunks:
            self._tokens(fact, at)

    def _window(self, engine: str, now: float) -> _Window:
        window = self._engines.get(engine)
        if window is None:
            window = self._engines[engine] = _Window(started_at=now, at=now)
        window.advance(now)
        return window

    def _send(self, fact: of.AttemptSent, now: float) -> None:
        window = self._window(fact.engine, now)
        self._where[fact.request_id] = fact.engine
        window.send(fact.request_id, fact.tokens, now)
        if window.since and window.mostly_unread:
            self._stop(window, now)

    def _tokens(self, fact: of.TokensReceived, now: float) -> None:
        key = fact.request_id
        engine = self._where.get(key)
        if engine is None:
            return
        window, tokens = self._window(engine, now), fact.tokens
        window.running[key] += tokens
        window.held += tokens
        window.arrived(key, tokens, now)
        if now - window.started_at >= WINDOW:
            self._close(window, now)

    def _end(self, fact: of.AttemptEnded, now: float) -> None:
        key = fact.request_id
        engine = self._where.pop(key, None)
        if engine is not None:
            window = self._window(engine, now)
            window.held -= window.running.pop(key)
            window.since.pop(key, None)
            window.read_one(key, now)
            if not window.since:
                self._close(window, now)

    def _stop(self, window: _Window, now: float) -> None:
        self._close(window, now)
        window.since.clear()

    def _lose(self, engine: str) -> None:
        window = self._engines.pop(engine, None)
        for key in window.running if window is not None else ():
            self._where.pop(key, None)

    def _close(self, window: _Window, now: float) -> None:
        seen = window.observation()
        if seen is not None:
            self._fit.observe(seen)
            # One fit takes milliseconds, and a large fleet ends hundreds of windows a second.
            if now - self._fitted_at >= WINDOW / 2:
                self._planner.model, self._fitted_at = self._fit.model, now
        window.restart(now)
