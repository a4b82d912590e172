"""On which engine a request goes: the least loaded, with a group's prefix kept on one."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

__all__ = ["Placement", "Places"]

Placement: TypeAlias = Literal["prefix", "spread"]


class Places:
    """The engines that take requests now.

    Invariant: the heap has exactly one entry for each engine; its load is the engine's or, where
    a request was put there by preference, less (mended when it comes up).

    Args:
        loads: open requests of each engine that takes any.
    """

    def __init__(self, loads: Mapping[str, int]) -> None:
        self._loads = dict(loads)
        self._heap = [(load, name) for name, load in self._loads.items()]
        heapq.heapify(self._heap)

    def take(self, *, prefer: str, slack: int, avoid: Collection[str]) -> str | None:
        """The engine for one request, which counts from now on; None if there is none.

        Args:
            prefer: where the prompt's prefix is cached.
            slack: how many more requests than the least loaded one that engine may have and still
                be preferred; -1 for never.
            avoid: the engines that just failed the request; taken only if there is no other.
        """
        least = self._least(avoid)
        if least is None:
            return None
        near = self._loads[least] + slack
        if prefer not in avoid and self._loads.get(prefer, near + 1) <= near:
            least = prefer
        self._loads[least] += 1
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
