"""Assigns slices to tracks so that they do not overlap.

Invariant: a lane has one holder at a time. A new holder gets the lowest free lane, so there are as
many lanes as were held at once.
"""

from __future__ import annotations

import heapq

__all__ = ["Lanes"]


class Lanes:
    """The lanes of one engine, counted from 0."""

    def __init__(self) -> None:
        self._freed: list[int] = []
        self.count = 0
        """Number of lanes."""

    def take(self) -> int:
        if self._freed:
            return heapq.heappop(self._freed)
        self.count += 1
        return self.count - 1

    def free(self, lane: int) -> None:
        heapq.heappush(self._freed, lane)
