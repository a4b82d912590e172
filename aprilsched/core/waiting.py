"""The requests that wait to be sent, in the order in which they are.

Invariants: a request's place is given when it begins to wait and does not change, since no token
of it arrives then (what its siblings show meanwhile counts when it waits again); the top of
either heap waits. So taking the next one costs the logarithm of how many wait, and nothing is
sorted after each event.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from aprilsched.core.policies.resume import Place
from aprilsched.core.records import RequestRecord

__all__ = ["Waiting"]


class Waiting:
    """Requests by id and by the `place` they are given; those of evaluations can be taken
    alone."""

    def __init__(self, place: Callable[[RequestRecord], Place]) -> None:
        self._place = place
        self._waiting: dict[int, RequestRecord] = {}
        self._training: list[tuple[Place, int]] = []
        self._evaluations: list[tuple[Place, int]] = []

    def add(self, request: RequestRecord) -> None:
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap(request), (self._place(request), request.request_id))

    def discard(self, request: RequestRecord) -> None:
        """It was sent, or its group was dropped. From within a heap it goes when it comes up."""
        if self._waiting.pop(request.request_id, None) is None:
            return
        heap = self._heap(request)
        while heap and heap[0][1] not in self._waiting:
            heapq.heappop(heap)

    def first(self, *, training: bool) -> RequestRecord | None:
        """The next to be sent; without `training` the next of an evaluation."""
        heaps = (self._evaluations, self._training) if training else (self._evaluations,)
        tops = [heap[0] for heap in heaps if heap]
        return self._waiting[min(tops)[1]] if tops else None

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def places(self) -> Iterator[tuple[Place, RequestRecord]]:
        """Every request with the place that it was given (for the check of the invariants)."""
        for heap in (self._training, self._evaluations):
            for place, request_id in heap:
                if request_id in self._waiting:
                    yield place, self._waiting[request_id]

    def _heap(self, request: RequestRecord) -> list[tuple[Place, int]]:
        training = request.rollout.group.evaluation_id is None
        return self._training if training else self._evaluations
