"""Learning an engine's step times from the run itself, for automatic over-provisioning.

A listener. Tokens are seen when a chunk arrives, not when they are sampled, so what is timed is
each request from one of its chunks to the next: so many tokens, so many steps. (Tokens over the
mean number of requests would be a third wrong: a wave's requests stream in step, and a window has
one chunk of each more or less at its ends.) A request's first chunk after it was sent, or after a
pause, is not timed. Each window ends with a pause, or after `WINDOW` seconds; what is left of
errors evens out over many, and the fit counts none of them for more than a tenth of an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.planning import Planner
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
    running: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """Context tokens of each open attempt."""
    held: int = 0
    running_time: float = 0.0
    held_time: float = 0.0
    since: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
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

    def arrived(self, key: tuple[int, int], tokens: int, now: float) -> None:
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
        self._where: dict[tuple[int, int], str] = {}
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            do.Send: self._send,
            ev.Progress: self._progress,
            ev.Finished: self._end,
            ev.Interrupted: self._end,
            ev.Failed: self._end,
            do.Pause: self._stop,
            ev.Continued: self._begin,
            do.LoseEngine: self._lose,
        }

    def on_event(self, event: ev.Event, now: float) -> None:
        self._on(event, now)

    def on_command(self, command: do.Command, now: float) -> None:
        self._on(command, now)

    def _on(self, what: object, now: float) -> None:
        handler = self._handlers.get(type(what))
        if handler is not None:
            handler(what, now)

    def _window(self, engine: str, now: float) -> _Window:
        window = self._engines.get(engine)
        if window is None:
            window = self._engines[engine] = _Window(began=now, at=now)
        window.advance(now)
        return window

    def _send(self, command: do.Send, now: float) -> None:
        window = self._window(command.engine, now)
        key, tokens = (command.request_id, command.attempt), len(command.input_ids)
        self._where[key] = command.engine
        window.running[key] = tokens
        window.held += tokens
        if window.since:
            window.prefilled += tokens
            window.passes += now - window.sent_at > _BURST
        window.sent_at = now

    def _progress(self, event: ev.Progress, now: float) -> None:
        key = (event.request_id, event.attempt)
        engine = self._where.get(key)
        if engine is None:
            return
        window, tokens = self._window(engine, now), len(event.token_ids)
        window.running[key] += tokens
        window.held += tokens
        window.arrived(key, tokens, now)
        if now - window.began >= WINDOW:
            self._close(window, now)

    def _end(self, event: ev.Finished | ev.Interrupted | ev.Failed, now: float) -> None:
        key = (event.request_id, event.attempt)
        engine = self._where.pop(key, None)
        if engine is not None:
            window = self._window(engine, now)
            window.held -= window.running.pop(key)
            window.since.pop(key, None)
            if not window.since:
                self._close(window, now)

    def _stop(self, command: do.Pause, now: float) -> None:
        window = self._window(command.engine, now)
        self._close(window, now)
        window.since.clear()

    def _begin(self, event: ev.Continued, now: float) -> None:
        self._window(event.engine, now).since.clear()

    def _lose(self, command: do.LoseEngine, _: float) -> None:
        window = self._engines.pop(command.engine, None)
        for key in window.running if window is not None else ():
            self._where.pop(key, None)

    def _close(self, window: _Window, now: float) -> None:
        seen = window.observation()
        if seen is not None:
            self._fit.observe(seen)
            self._planner.model = self._fit.model
        window.restart(now)
