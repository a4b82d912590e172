"""Chooses the engine for a request: the least loaded one, or the one that has its context cached.

==========  ============================================================================
prefix      a group stays on one engine, which has its prompt cached, and an episode on the
            one that had its last turn, unless that has far more requests than the others
spread      each rollout goes to the engine with the fewest requests
==========  ============================================================================
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, TypeAlias

_LEFT_OVER = 4
"""Entries of the heap for each engine, from which on it is rebuilt."""

CONTEXT_LEAD_REQUESTS = 8
"""Largest lead in requests, over the least loaded engine, of the engine that caches the context of
earlier turns or of prompts with one affinity. Another engine would prefill the whole context."""

Placement: TypeAlias = Literal["prefix", "spread"]


class EngineLoads:
    """The engines that take requests now, with their loads.

    Invariant: the heap contains an entry for each engine with the load of the engine, or a smaller
    one if :meth:`add_request` has raised it; the entry is corrected when it reaches the top.
    Entries with greater loads, or of engines that take no more requests, are obsolete and removed
    there.

    Args:
        loads: number of open requests of each engine that takes requests.
    """

    def __init__(self, loads: Mapping[str, float]) -> None:
        self.loads = dict(loads)
        """Current loads by engine name."""
        self._heap = [(load, name) for name, load in self.loads.items()]
        heapq.heapify(self._heap)

    def put(self, engine: str, load: float | None) -> None:
        """Set the load of an engine that takes requests; None if it takes no more requests."""
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

    def add_request(self, engine: str) -> None:
        """Count one more request on an engine that takes requests."""
        self.loads[engine] += 1

    def least(self, avoid: Collection[str] = ()) -> str | None:
        """Return the engine with the smallest load, or None if no engine takes requests.

        Engines in `avoid` are chosen only if all other engines are unavailable.
        """
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


class Preference(NamedTuple):
    """The engine that a request should go to."""

    engine: str
    max_lead: float
    """Largest number of requests by which its load may exceed the least loaded engine's."""


def preference_of(
    placement: Placement,
    *,
    destination: str,
    avoid: Collection[str],
    context_engine: str,
    members: int,
    shares_context: bool,
) -> Preference | None:
    """Return the engine that a request should go to, or None if it makes no difference.

    Args:
        destination: the engine that a moved request should reach; empty if it was not moved.
        avoid: names of engines that failed the request.
        context_engine: the engine that has the request's context in its cache; empty if none.
        members: number of rollouts of its group.
        shares_context: whether earlier turns, or prompts with one affinity, share the context.
    """
    if destination and destination not in avoid:
        return Preference(engine=destination, max_lead=math.inf)
    if placement != "prefix" or not context_engine:
        return None
    # A group stays on its engine while the engine leads the others by less than one group.
    lead = max(members, CONTEXT_LEAD_REQUESTS) if shares_context else members
    return Preference(engine=context_engine, max_lead=lead)


def choose_engine(
    loads: EngineLoads, preference: Preference | None, *, avoid: Collection[str]
) -> str | None:
    """Return the engine for a request, or None if no engine takes requests.

    Args:
        loads: the engines that take requests.
        preference: the engine that it should go to.
        avoid: names of engines that failed the request. They are the last resort.
    """
    least = loads.least(avoid)
    if least is None or preference is None or preference.engine in avoid:
        return least
    load = loads.loads.get(preference.engine)
    if load is None or load > loads.loads[least] + preference.max_lead:
        return least
    return preference.engine


Place: TypeAlias = tuple[bool, bool, int, int]
"""The sort key of a waiting request."""


def place_of(*, training: bool, carried: bool, group_id: int, index: int) -> Place:
    """Return the sort key of a request.

    Evaluations come first, because they delay training only briefly, then carried requests, then
    new ones (APRIL, CoPRIS).

    Args:
        training: False for a request of an evaluation.
        carried: the rollout was sent before.
        group_id: groups have ascending ids in the order of their launch.
        index: the rollout's place in its group.
    """
    return (training, training and not carried, group_id, index)


def rank_of(*, training: bool, carried: bool) -> int:
    """Return the priority of a request inside an engine with priorities; lower ranks go first.

    It is 0 for an evaluation, 1 for a carried rollout and 2 for a new one. Ranks differ too little
    to preempt a running request for another.
    """
    return training + (training and not carried)
