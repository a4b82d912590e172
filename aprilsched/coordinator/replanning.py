"""Automatic over-provisioning: learns the engines' step times, and chooses schedules by them.

:class:`StepTimes` is a listener that keeps the planner's model up to date. :class:`Planning`
carries out the command Plan in a thread, because choosing a schedule takes about a second of
arithmetic and must not stop the event loop.

Tokens are seen when a chunk arrives, not when they are sampled. So StepTimes times each request
from one of its chunks to the next: the tokens of a chunk are the decode steps of that time. (The
tokens of all requests divided by the mean number of requests would be wrong by a third: the
requests of a wave stream in step, so a window has about one chunk of each more or less at its
ends.) The first chunk of a request after it was sent, or after a pause, is not timed. A window ends
with a pause, or after `WINDOW` seconds. The errors that remain average out over many windows, and
the fit counts each window as if it were wrong by a tenth at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aprilsched.coordinator.tasks import Tasks
from aprilsched.core.config import SchedulerConfig
from aprilsched.core.messages import facts as of
from aprilsched.core.messages.commands import Plan
from aprilsched.core.messages.events import Event, Planned
from aprilsched.core.messages.facts import Fact
from aprilsched.driver.callbacks import called_now
from aprilsched.planning import Planner
from aprilsched.telemetry.base import TokenChunks
from aprilsched.timing.online import Observation, OnlineFit

__all__ = ["WINDOW", "Planning", "StepTimes"]

log = logging.getLogger("aprilsched")

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


class Planning:
    """Carries out Plan; a failure keeps the schedule in force and is said once for each time."""

    def __init__(
        self, *, planner: Planner, config: SchedulerConfig, feed: Callable[[Event], None]
    ) -> None:
        self._planner = planner
        self._config = config
        self._feed = feed
        self._tasks: Tasks | None = None

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def plan(self, command: Plan) -> None:
        if self._planner.inline:
            self._feed(self._planned(command))
        elif self._tasks is not None:
            self._tasks.start(("planning", command), self._plan(command))

    async def _plan(self, command: Plan) -> None:
        self._feed(await asyncio.to_thread(self._planned, command))

    def _planned(self, command: Plan) -> Planned:
        try:
            schedule = called_now("the planner", self._planner.plan, command, self._config)
            changes = not schedule.same_as(command.current)
        except Exception as error:
            log.exception("no schedule could be chosen; the one in force stays")
            return Planned(schedule=None, cause=repr(error))
        if changes:
            log.info("from now on %s", schedule.why)
        return Planned(schedule=schedule)
