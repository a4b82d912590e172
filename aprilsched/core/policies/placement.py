"""On which engine a request goes: the least loaded, with a group's prefix kept on one.

While some engines are not back from a pause, those that are take no more than their fair share:
the first of them would draw the whole queue otherwise (seen with eight engines: one had six times
the work of the others, and the batch took ten times as long).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

__all__ = ["Places"]


class Places:
    """The engines that take requests now.

    Invariant: the heap has exactly one entry for each engine that has room; its load is the
    engine's or, where a request was put there by preference, less (mended when it comes up).

    Args:
        loads: open requests of each engine that takes any.
        slack: how many more requests than the least loaded one an engine may have and still be
            preferred for the prefix that it has cached.
        share: requests that an engine may have; None: no limit.
    """

    def __init__(self, loads: Mapping[str, int], *, slack: int, share: int | None = None) -> None:
        self._loads = dict(loads)
        self._slack = slack
        self._share = share
        self._heap = [(load, name) for name, load in self._loads.items()]
        heapq.heapify(self._heap)

    def take(self, *, prefer: str, avoid: str) -> str | None:
        """The engine for one request, which counts from now on; None if no engine has room.

        Args:
            prefer: where the prompt's prefix is cached.
            avoid: the engine that just failed the request; taken only if it is the last.
        """
        least = self._least(avoid)
        if least is None or (self._share is not None and self._loads[least] >= self._share):
            return None
        near = self._loads[least] + self._slack
        if prefer != avoid and self._loads.get(prefer, near + 1) <= near:
            least = prefer
        self._loads[least] += 1
        return least

    def _least(self, avoid: str) -> str | None:
        while self._heap:
            load, name = self._heap[0]
            if load == self._loads[name]:
                break
            heapq.heapreplace(self._heap, (self._loads[name], name))
        else:
            return None
        if name != avoid or len(self._heap) == 1:
            return name
        others = (other for other in self._loads if other != avoid)
        return min(others, key=lambda other: (self._loads[other], other))
