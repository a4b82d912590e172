"""Tracks that slices lie on, so that none overlaps another.

Invariant: a lane is held by one at a time; whoever comes takes the lowest that is free, so there
are as many lanes as were ever held at once.
"""

from __future__ import annotations

import heapq

__all__ = ["Lanes"]


class Lanes:
    """Counted from 0."""

    def __init__(self) -> None:
        self._freed: list[int] = []
        self.count = 0
        """How many there are."""

    def take(self) -> int:
        if self._freed:
            return heapq.heappop(self._freed)
        self.count += 1
        return self.count - 1

    def free(self, lane: int) -> None:
        heapq.heappush(self._freed, lane)
