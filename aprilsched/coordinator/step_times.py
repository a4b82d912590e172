"""Learning an engine's step times from the run itself, for automatic over-provisioning.

A listener. Tokens are seen when a chunk arrives, not when they are sampled, so what is timed is
each request from one of its chunks to the next: so many tokens, so many steps. (Tokens over the
mean number of requests would be a third wrong: a wave's requests stream in step, and a window has
one chunk of each more or less at its ends.) A request's first chunk after it was sent, or after a
pause, is not timed. Each window ends with a pause, or after `WINDOW` seconds; what is left of
errors evens out over many, and the fit counts none of them for more than a tenth of an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aprilsched.core.messages import facts as of
from aprilsched.core.messages.facts import Fact
from aprilsched.planning import Planner
from aprilsched.telemetry.base import TokenChunks
from aprilsched.timing.online import Observation, OnlineFit

__all__ = ["WINDOW", "StepTimes"]

WINDOW = 2.0
"""Seconds: a few hundred steps, of which each request streams a few chunks. In longer ones the
batch shrinks so much that the parts of a step's time cannot be told apart: with 10 s a
doubled t0 was found by a tenth only, with 2 s by four fifths."""
_LEAST_TOKENS = 256
_BURST = 2e-3
"""Requests that arrive within so many seconds are prefilled together."""


@dataclass(slots=True, kw_only=True)
class _Window:
    """What one engine does, since `began`."""

    began: float
    at: float
    running: dict[int, int] = field(default_factory=dict[int, int])
    """Context tokens of each open attempt, by request."""
    held: int = 0
    running_time: float = 0.0
    held_time: float = 0.0
    since: dict[int, float] = field(default_factory=dict[int, float])
    """When the last chunk of those that are timed arrived."""
    timed: float = 0.0
    tokens: int = 0
    """Request seconds from chunk to chunk, and the tokens that came in them."""
    passes: int = 0
    prefilled: int = 0
    sent_at: float = -1.0

    def advance(self, now: float) -> None:
        seconds = now - self.at
        self.running_time += len(self.running) * seconds
        self.held_time += self.held * seconds
        self.at = now

    def restart(self, now: float) -> None:
        self.began = self.at = now
        self.running_time = self.held_time = self.timed = 0.0
        self.tokens = self.passes = self.prefilled = 0

    def arrived(self, key: int, tokens: int, now: float) -> None:
        """A chunk of a request."""
        if not self.since:
            self.restart(now)  # it was idle or prefilled, or nobody knows what it did
        elif key in self.since:
            self.timed += now - self.since[key]
            self.tokens += tokens
        self.since[key] = now

    def observation(self) -> Observation | None:
        seconds = self.at - self.began
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
    """Keeps the planner's model up to date."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._fit = OnlineFit(planner.model)
        self._engines: dict[str, _Window] = {}
        self._where: dict[int, str] = {}
        """The engine of each request with an open attempt."""

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
                    self._stop(fact.engine, now)
                case of.EngineModeChanged(start="continuing"):
                    self._window(fact.engine, now).since.clear()
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
            window = self._engines[engine] = _Window(began=now, at=now)
        window.advance(now)
        return window

    def _send(self, fact: of.AttemptSent, now: float) -> None:
        window = self._window(fact.engine, now)
        self._where[fact.request_id] = fact.engine
        window.running[fact.request_id] = fact.tokens
        window.held += fact.tokens
        if window.since:
            window.prefilled += fact.tokens
            window.passes += now - window.sent_at > _BURST
        window.sent_at = now

    def _tokens(self, fact: of.TokensReceived, now: float) -> None:
        key = fact.request_id
        engine = self._where.get(key)
        if engine is None:
            return
        window, tokens = self._window(engine, now), fact.tokens
        window.running[key] += tokens
        window.held += tokens
        window.arrived(key, tokens, now)
        if now - window.began >= WINDOW:
            self._close(window, now)

    def _end(self, fact: of.AttemptEnded, now: float) -> None:
        key = fact.request_id
        engine = self._where.pop(key, None)
        if engine is not None:
            window = self._window(engine, now)
            window.held -= window.running.pop(key)
            window.since.pop(key, None)
            if not window.since:
                self._close(window, now)

    def _stop(self, engine: str, now: float) -> None:
        window = self._window(engine, now)
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
            self._planner.model = self._fit.model
        window.restart(now)
