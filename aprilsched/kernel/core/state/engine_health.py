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

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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


# --- admission -----------------------------------------------------------------------------------

# What is learned of an engine that refuses requests because it has no room for them now.
#
# Such a refusal is no failure. The engine gets nothing for a while, and then at most as many
# requests as it had when it refused one. Each request that it begins to answer is evidence that it
# takes another, so the limit grows by one. With each refusal four times as many are needed, and
# half as many while the limit grows. So a queue that was full for a moment is forgotten within a
# few answers, and a limit that stays is met again once in eight times as many requests.

PAUSE_S = 1.0
"""Seconds without a request after a refusal that names no time or less, if the engine has no other
request; the next pauses are twice as long each."""
MAX_PAUSE_S = 30.0
"""Largest number of seconds of such a pause."""
MAX_RETRY_AFTER_S = 300.0
"""Largest number of seconds that an engine may ask to wait."""
_MAX_ROUNDS = 8


@dataclass(slots=True, kw_only=True)
class Admission:
    """How many requests an engine takes that has refused one because it was busy."""

    limit: int = 1
    """Largest number of open requests."""
    since: float = math.inf
    """When it refused the first request since it last had or answered one."""
    closed_until: float = -math.inf
    """Nothing is sent to it before this time."""
    _last: int = -1
    """Number of attempts that had been sent, to any engine, at the latest refusal that counted."""
    _pause_s: float = PAUSE_S
    """The next pause."""
    _needed: int = 0
    """Number of answers by which the limit grows by one."""
    _answers: int = 0
    """Number of them that have begun since the limit last changed."""
    _grown_at: float = math.inf
    """Number of attempts that had been sent when it last grew, if nothing was refused since."""

    def refuse(
        self,
        now: float,
        *,
        sent: int,
        attempts_sent: int,
        others: int,
        partial: bool,
        wait_s: float | None,
    ) -> None:
        """Note a refusal. Those of attempts that were open at the same time count once.

        Args:
            now: the time.
            sent: number of the refused attempt.
            attempts_sent: number of attempts that have been sent by now.
            others: number of other open requests on the engine.
            partial: whether the engine had begun to answer the request.
            wait_s: seconds that the engine asks to wait; None if it does not say.
        """
        fresh = sent > self._last
        # An engine with others of ours is not dead. Time in which it is not asked does not count.
        asked = now - self.closed_until <= MAX_PAUSE_S
        self.since = min(self.since, now) if asked and not others else now
        if fresh or not partial:
            self.limit = max(1, others if fresh else min(self.limit, others))
        if fresh:
            self._needed = min(max(1, 4 * self._needed), _MAX_ROUNDS * self.limit)
            self._last = attempts_sent
        wait_s = wait_s or 0.0
        # With others of ours on the engine, the end of one of them is waited for.
        if wait_s < PAUSE_S and not others:
            wait_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        self.closed_until = max(self.closed_until, now + min(wait_s, MAX_RETRY_AFTER_S))
        self._answers, self._grown_at = 0, math.inf

    def answer(self, open_requests: int, *, sent: int, attempts_sent: int) -> None:
        """Note that the engine has begun to answer the attempt of number `sent`."""
        self.since, self._pause_s = math.inf, PAUSE_S
        self._answers += 1
        # A limit that is not reached is not tested by an answer.
        if self._answers >= self._needed and 2 * open_requests > self.limit:
            self.limit += 1
            if sent > self._grown_at:
                self._needed = max(1, self._needed // 2)
            self._answers, self._grown_at = 0, attempts_sent

    def is_full(self, now: float, open_requests: int) -> bool:
        """Whether nothing may be sent to the engine now."""
        return open_requests >= self.limit or now < self.closed_until


# --- durations -----------------------------------------------------------------------------------

# How long the trainer trains, and how long new weights take, measured from the run's own events.
#
# The first duration in a process is left out, because it has the compilation of the trainer and
# the setting up of connections in it. Of the others the last ones count, without those that are
# far above the median, such as a batch after which the trainer wrote a checkpoint.

_LAST = 8
"""Number of durations that count."""
_FAR = 3.0
"""A duration above this many times the median of those that count is left out."""


@dataclass(slots=True)
class Durations:
    """The last durations of something, in seconds."""

    begun: bool = False
    """Whether the first one, which is left out, was seen."""
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))

    def add(self, seconds: float) -> None:
        """Note the next duration."""
        if self.begun:
            self.last.append(seconds)
        self.begun = True

    @property
    def mean(self) -> float | None:
        """The mean of those that count; None while there is none."""
        return float(self._usual().mean()) if self.last else None

    @property
    def spread(self) -> float:
        """The standard deviation of those that count; 0 while there are fewer than two."""
        return float(self._usual().std()) if self.last else 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """The means of up to 32 equal parts of all of them, from the shortest to the longest. They
        have the mean of all, and the tail."""
        if not self.last:
            return ()
        ordered = np.sort(np.array(self.last, dtype=np.float64))
        return tuple(float(part.mean()) for part in np.array_split(ordered, min(32, len(ordered))))

    def _usual(self) -> NDArray[np.float64]:
        last = np.array(self.last, dtype=np.float64)
        return last[last <= _FAR * np.median(last)]


@dataclass(slots=True)
class TrainerTimes:
    """The trainer's times. It trains while it has a batch, or groups of one, and none of its calls
    is open: it waits for no batch, no group, no update and no evaluation. Steps: ``replan``,
    ``refit``, ``batch``."""

    training: Durations = field(default_factory=Durations)
    """For each batch, the time for which the trainer trained on it."""
    early: Durations = field(default_factory=Durations)
    """For each batch, how much of that time was before the trainer had its last group."""
    steps: Durations = field(default_factory=Durations)
    """The times from the end of one training to the end of the next."""
    refits: Durations = field(default_factory=Durations)
    """For each update, the time for which weights were loaded; with rolling refits, for each engine
    that took one."""
    trained: float | None = None
    """For how long the trainer has trained on the batch that it took last, or takes group by group,
    up to `since`; None if it has asked for another batch since then."""
    trained_early: float = 0.0
    """How much of that time was before it had the last of the groups that it has."""
    since: float | None = None
    """Since when it trains without a pause; None while it does not."""
    ended: float | None = None
    """When it last ended its training on a batch."""

    @property
    def early_share(self) -> float:
        """The share of the trainer's time for a batch that is before it has the batch's last group;
        0 while none is known."""
        training, early = self.training.mean, self.early.mean
        return min(1.0, early / training) if training and early else 0.0

    def take(self) -> None:
        """Note that the trainer, which has waited for it, has taken a batch or a group of one."""
        self.trained = self.trained_early = self.trained or 0.0

    def follow(self, *, trains: bool, now: float) -> None:
        """Note whether the trainer trains from `now` on."""
        if self.trained is not None and self.since is not None:
            self.trained += now - self.since
        self.since = now if trains else None

    def end(self, now: float) -> None:
        """Note that the trainer has ended its training on a batch, as it asks for the next one."""
        if self.trained is None:
            return
        self.training.add(self.trained)
        self.early.add(self.trained_early)
        if self.ended is not None:
            self.steps.add(now - self.ended)
        self.trained, self.trained_early, self.ended = None, 0.0, now


# --- the caller's functions ----------------------------------------------------------------------

_LAST_CALLS = 256
"""Number of calls of the caller's functions that count."""
_PRIOR_GROUPS = 8.0
"""Number of groups, accepted as all of them, with which the share of a half of them begins."""
_LEAST_ACCEPTED = 0.05
"""The least share that is planned for, because a trial takes as much longer as the share is
smaller."""


def _calls() -> Durations:
    return Durations(begun=True, last=deque(maxlen=_LAST_CALLS))


@dataclass(slots=True)
class CallerTimes:
    """How long the caller's rewards and tools take, and what its accept function says. Steps:
    ``turns``, ``replan``. A resumed run measures them again."""

    rewards: Durations = field(default_factory=_calls)
    """For each group, the time from the end of its last response until it was accepted or
    refused."""
    verdicts: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=_LAST_CALLS))
    """The tokens of each group that the accept function was asked about, and what it said."""
    gaps: Durations = field(default_factory=_calls)
    """The times between the turns of episodes."""
    ends: Durations = field(default_factory=_calls)
    """The times from the last turn of an episode until it returned."""
    turns: deque[int] = field(default_factory=lambda: deque(maxlen=_LAST_CALLS))
    """Numbers of turns of episodes that have returned."""

    @property
    def reward_seconds(self) -> tuple[float, ...]:
        """The times of rewards, from the shortest to the longest; empty where all are 0."""
        parts = self.rewards.parts
        return parts if any(parts) else ()

    @property
    def accepted(self) -> tuple[float, float, float]:
        """The median of the tokens of a group, the share that is accepted of the groups up to it,
        and that of the longer ones."""
        if all(accepted for _, accepted in self.verdicts):
            return 0.0, 1.0, 1.0
        tokens, accepted = np.array(self.verdicts, dtype=np.float64).T
        median, mean = float(np.median(tokens)), float(accepted.mean())
        halves = (accepted[tokens <= median], accepted[tokens > median])
        short, long = (
            max(_LEAST_ACCEPTED, (half.sum() + _PRIOR_GROUPS * mean) / (len(half) + _PRIOR_GROUPS))
            for half in halves
        )
        return median, float(short), float(long)

    @property
    def gaps_of_response(self) -> float:
        """The mean number of gaps between the turns of a response."""
        return float(np.mean(self.turns)) - 1 if self.turns else 0.0
