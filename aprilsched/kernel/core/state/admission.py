"""What is learned of an engine that refuses requests because it has no room for them now.

Such a refusal is no failure. The engine gets nothing for a while, and then at most as many
requests as it had when it refused one. Each request that it begins to answer is evidence that it
takes another, so the limit grows by one. With each refusal four times as many are needed, and
half as many while the limit grows. So a queue that was full for a moment is forgotten within a
few answers, and a limit that stays is met again once in eight times as many requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
