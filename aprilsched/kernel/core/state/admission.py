"""Admission control for an engine that rejects requests because it is busy.

Such a refusal does not count as a failure. The engine gets no requests for a while, and then at
most the number it had when it refused one. The limit grows by one after enough answered requests:
each refusal multiplies the required number of answers by four, and each growth without a refusal
halves it. So a queue that was full for a moment is forgotten within a few answers, and a permanent
limit is exceeded only once in `8 * limit` answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PAUSE_S = 1.0
"""First backoff in seconds for an idle engine whose refusal names no Retry-After, or a shorter one;
each further backoff is twice as long."""
MAX_PAUSE_S = 30.0
"""Longest backoff, in seconds."""
MAX_RETRY_AFTER_S = 300.0
"""Longest Retry-After that is respected, in seconds."""
_MAX_ROUNDS = 8


@dataclass(slots=True, kw_only=True)
class Admission:
    """The admission limit of an engine that has refused a request because it was busy."""

    limit: int = 1
    """Largest number of open requests."""
    since: float = math.inf
    """Time of the first refusal since the engine last had or answered a request; inf if none."""
    closed_until: float = -math.inf
    """Nothing is sent to the engine before this time."""
    _last: int = -1
    """Number of attempts sent, to any engine, by the latest refusal that counted."""
    _pause_s: float = PAUSE_S
    """The next backoff, in seconds."""
    _needed: int = 0
    """Number of answers after which the limit grows by one."""
    _answers: int = 0
    """Number of answers started since the limit last changed."""
    _grown_at: float = math.inf
    """Number of attempts sent when the limit last grew; inf after a refusal."""

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
        """Record a refusal. Refusals of attempts open at the same time count once.

        Args:
            now: the time.
            sent: number of the refused attempt.
            attempts_sent: number of attempts sent so far.
            others: number of other open requests on the engine.
            partial: whether the engine had already started its answer.
            wait_s: Retry-After of the engine in seconds; None without one.
        """
        fresh = sent > self._last
        # An engine that runs other requests of ours is alive. Time without a request to it does
        # not count either.
        asked = now - self.closed_until <= MAX_PAUSE_S
        self.since = min(self.since, now) if asked and not others else now
        if fresh or not partial:
            self.limit = max(1, others if fresh else min(self.limit, others))
        if fresh:
            self._needed = min(max(1, 4 * self._needed), _MAX_ROUNDS * self.limit)
            self._last = attempts_sent
        wait_s = wait_s or 0.0
        # If the engine runs other requests of ours, the next one to finish ends the wait.
        if wait_s < PAUSE_S and not others:
            wait_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MAX_PAUSE_S)
        self.closed_until = max(self.closed_until, now + min(wait_s, MAX_RETRY_AFTER_S))
        self._answers, self._grown_at = 0, math.inf

    def answer(self, open_requests: int, *, sent: int, attempts_sent: int) -> None:
        """Record that the engine has started to answer attempt number `sent`."""
        self.since, self._pause_s = math.inf, PAUSE_S
        self._answers += 1
        # An answer is evidence only if the load is near the limit.
        if self._answers >= self._needed and 2 * open_requests > self.limit:
            self.limit += 1
            if sent > self._grown_at:
                self._needed = max(1, self._needed // 2)
            self._answers, self._grown_at = 0, attempts_sent

    def is_full(self, now: float, open_requests: int) -> bool:
        """Return whether the engine may get no request now."""
        return open_requests >= self.limit or now < self.closed_until
