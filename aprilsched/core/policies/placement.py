"""Chooses the engine for a request: the least loaded one, or the one with the group's prefix.

==========  ============================================================================
prefix      a group stays on one engine, which has its prompt cached, and an episode on the
            one that had its last turn, unless that has far more requests than the others
spread      each rollout goes to the engine with the fewest requests
==========  ============================================================================
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

_LEFT_OVER = 4
"""Entries of the heap for each engine, from which on it is made anew."""

Placement: TypeAlias = Literal["prefix", "spread"]


class Places:
    """The engines that take requests now, with their loads.

    Invariant: the heap has an entry for each engine whose load is that of the engine, or less if a
    request was put there by preference; it is corrected when the entry comes to the top. Entries of
    greater loads, and those of engines that take no more requests, are left over and thrown away
    there.

    Args:
        loads: number of open requests of each engine that takes requests.
    """

    def __init__(self, loads: Mapping[str, float]) -> None:
        self.loads = dict(loads)
        """Their loads now, by name."""
        self._heap = [(load, name) for name, load in self.loads.items()]
        heapq.heapify(self._heap)

    def put(self, engine: str, load: float | None) -> None:
        """Note that an engine takes requests and has this load, or, with None, that it takes no
        more."""
        if load is None:
            self.loads.pop(engine, None)
        elif self.loads.get(engine) != load:
            self.loads[engine] = load
            heapq.heappush(self._heap, (load, engine))
            if len(self._heap) > _LEFT_OVER * len(self.loads):
                self._heap = [(load, name) for name, load in self.loads.items()]
                heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self.loads)

    def least(self) -> str | None:
        """The engine with the smallest load."""
        return self._least(())

    def take(self, *, prefer: str, slack: float, avoid: Collection[str]) -> str | None:
        """The engine for one request, or None if no engine takes requests. The request counts as a
        load of 1 on the engine from now on.

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
        near = self.loads[least] + slack
        if prefer not in avoid and prefer in self.loads and self.loads[prefer] <= near:
            least = prefer
        self.loads[least] += 1
        return least

    def _least(self, avoid: Collection[str]) -> str | None:
        while self._heap:
            top = self._heap[0]
            load = self.loads.get(top[1])
            if load == top[0]:
                break
            if load is None or load < top[0]:
                heapq.heappop(self._heap)
            else:
                heapq.heapreplace(self._heap, (load, top[1]))
        else:
            return None
        if top[1] not in avoid:
            return top[1]
        others = (other for other in self.loads if other not in avoid)
        return min(others, key=lambda other: (self.loads[other], other), default=top[1])


Place: TypeAlias = tuple[bool, bool, int, int]
"""The sort key of a request that waits to be sent."""


def place_of(*, training: bool, carried: bool, group_id: int, index: int) -> Place:
    """Return the sort key of a request: evaluations first, which delay training only briefly, then
    carried requests, then new ones (APRIL, CoPRIS).

    Args:
        training: False for a request of an evaluation.
        carried: the rollout was sent before.
        group_id: groups have ascending ids in the order of their launch.
        index: the rollout's place in its group.
    """
    return (training, training and not carried, group_id, index)


def rank_of(*, training: bool, carried: bool) -> int:
    """Return the priority of a request inside an engine that has priorities; lower ranks go first.

    It is 0 for an evaluation, 1 for a carried rollout and 2 for a new one. Ranks differ too little
    to put a running request out of an engine's batch for another."""
    return training + (training and not carried)
