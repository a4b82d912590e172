"""Chooses the engine for a request: the least loaded one, or the one with the group's prefix.

==========  ============================================================================
prefix      a group stays on one engine, which has its prompt cached, unless that has far
            more requests than the others
spread      each rollout goes to the engine with the fewest requests
length      each rollout goes to the engine whose requests are expected to need the fewest
            further tokens together, among those that have room for it in their KV pool. So
            long responses stand apart (Seer, arXiv 2511.14617)
==========  ============================================================================
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

__all__ = ["Placement", "Places"]

Placement: TypeAlias = Literal["prefix", "spread", "length"]


class Places:
    """The engines that take requests now, with their loads.

    Invariant: the heap has exactly one entry for each engine. The load of an entry is that of the
    engine, or less if a request was put there by preference; it is corrected when the entry comes
    to the top.

    Args:
        loads: number of open requests of each engine that takes requests, or another measure of
            its work.
    """

    def __init__(self, loads: Mapping[str, float]) -> None:
        self._loads = dict(loads)
        self._heap = [(load, name) for name, load in self._loads.items()]
        heapq.heapify(self._heap)

    def take(
        self, *, prefer: str, slack: float, avoid: Collection[str], amount: float = 1
    ) -> str | None:
        """The engine for one request, or None if no engine takes requests. The request counts as a
        load of `amount` on the engine from now on.

        Args:
            prefer: name of the engine that has the prompt's prefix in its cache.
            slack: how many more requests than the least loaded engine that engine may have and
                still be preferred; -1 for never.
            avoid: names of engines that failed the request. They are chosen only if there is no
                other.
        """
        least = self._least(avoid)
        if least is None:
            return None
        near = self._loads[least] + slack
        if prefer not in avoid and prefer in self._loads and self._loads[prefer] <= near:
            least = prefer
        self._loads[least] += amount
        return least

    def _least(self, avoid: Collection[str]) -> str | None:
        if not self._heap:
            return None
        while (top := self._heap[0])[0] != self._loads[top[1]]:
            heapq.heapreplace(self._heap, (self._loads[top[1]], top[1]))
        if top[1] not in avoid:
            return top[1]
        others = (other for other in self._loads if other not in avoid)
        return min(others, key=lambda other: (self._loads[other], other), default=top[1])
