"""A queue of timed calls in virtual time.

Invariant: calls of the same time happen in the order in which they were added, so a run is
repeatable to the last event.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """A heap of calls with their times; `now` (seconds) never goes backwards."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, act: Callable[[], None]) -> None:
        """Call `act` at `time`, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._due, (max(time, self.now), self._count, act))

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call `act` after `seconds`."""
        self.at(self.now + seconds, act)

    def step(self) -> bool:
        """Make the next call; False if there is none."""
        if not self._due:
            return False
        self.now, _, act = heapq.heappop(self._due)
        act()
        return True
