"""Collections of ready groups, waiting requests, due groups, and things that block a decision.

The core queries them after every event, and a query must cost the same with sixteen thousand
rollouts as with one thousand. So each collection maintains its answers together with its data, and
:mod:`aprilsched.kernel.core.invariants` compares the two.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from aprilsched.kernel.core.policies.placement import Place
from aprilsched.kernel.core.policies.staleness import Staleness
from aprilsched.kernel.core.state.records import GroupRecord, RequestRecord

T = TypeVar("T")

_QueueKey: TypeAlias = tuple[bool, int | None, bool]
"""Whether a request belongs to training, the version whose engines may take it, and whether it
waits for room."""


class Unmet(Generic[T]):
    """Things that did not meet a condition at their last check.

    The query after each event checks only the last of them, until that one meets the condition.
    """

    def __init__(self) -> None:
        self._left: list[T] = []

    def none(self, things: Callable[[], Iterable[T]], met: Callable[[T], bool]) -> bool:
        """Return whether all `things` meet the condition; things that are gone must meet it."""
        while self._left and met(self._left[-1]):
            self._left.pop()
        if not self._left:
            self._left = [thing for thing in things() if not met(thing)]
        return not self._left


@dataclass(slots=True)
class Counted:
    """The size of some complete groups, in groups, samples and tokens."""

    groups: int = 0
    samples: int = 0
    """Number of rollouts in these groups."""
    tokens: int = 0
    """Number of tokens in these groups."""

    def count(self, group: GroupRecord, times: int) -> None:
        """Add (1) or subtract (-1) a complete group, which no longer grows."""
        self.groups += times
        self.samples += times * len(group.members)
        self.tokens += times * group.tokens

    def __len__(self) -> int:
        return self.groups


class Ready(Counted):
    """Complete groups that wait for their batch, in the order of their completion."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: dict[int, GroupRecord] = {}
        self.accepted = Counted()
        """The accepted groups among them."""

    def add(self, group: GroupRecord) -> None:
        self._groups[group.group_id] = group
        self._count(group, 1)

    def accept(self, group: GroupRecord) -> None:
        """Count a ready group as accepted."""
        if group in self:
            self.accepted.count(group, 1)

    def put_back(self, groups: Sequence[GroupRecord]) -> None:
        """Put groups back in front after a withdrawn offer."""
        self._groups = {group.group_id: group for group in groups} | self._groups
        for group in groups:
            self._count(group, 1)

    def remove(self, group: GroupRecord) -> None:
        del self._groups[group.group_id]
        self._count(group, -1)

    def _count(self, group: GroupRecord, times: int) -> None:
        self.count(group, times)
        if group.accepted:
            self.accepted.count(group, times)

    def __contains__(self, group: GroupRecord) -> bool:
        return group.group_id in self._groups

    def __iter__(self) -> Iterator[GroupRecord]:
        return iter(self._groups.values())


class Waiting:
    """Waiting requests in the order of their `place`.

    Requests of evaluations, or of some versions, can be taken separately.

    Args:
        place: the sort key of a request, when it starts to wait.
        version: the version whose engines alone may take a request; None for the newest version.
        cold: whether a request needs room in a KV pool, when it starts to wait.
    """

    def __init__(
        self,
        place: Callable[[RequestRecord], Place],
        version: Callable[[RequestRecord], int | None],
        cold: Callable[[RequestRecord], bool],
    ) -> None:
        self._place = place
        self._version = version
        self._cold = cold
        self._waiting: dict[int, tuple[RequestRecord, _QueueKey]] = {}
        self._heaps: dict[_QueueKey, list[tuple[Place, int]]] = {}
        self._of: Counter[int | None] = Counter()
        """Number of waiting requests of each version."""

    def add(self, request: RequestRecord) -> None:
        trains = request.rollout.group.evaluation_id is None
        key = (trains, self._version(request), trains and self._cold(request))
        self.discard(request)
        self._waiting[request.request_id] = (request, key)
        self._of[key[1]] += 1
        heap = self._heaps.setdefault(key, [])
        heapq.heappush(heap, (self._place(request), request.request_id))

    def discard(self, request: RequestRecord) -> None:
        """Remove a request. Its heap entry is removed later, when it reaches the top."""
        if request.request_id not in self._waiting:
            return
        _, key = self._waiting.pop(request.request_id)
        self._of[key[1]] -= 1
        heap = self._heaps[key]
        while heap and not self._waits_under(heap[0][1], key):
            heapq.heappop(heap)
        if not heap:
            del self._heaps[key]
        if not self._of[key[1]]:
            del self._of[key[1]]

    def first(
        self,
        *,
        training: bool,
        versions: Collection[int | None] | None = None,
        cold: bool = True,
    ) -> RequestRecord | None:
        """Return the next request to send; None without one.

        Without `training` it is one of an evaluation; with `versions`, one of these versions;
        without `cold`, one that needs no room.
        """
        tops = [
            heap[0]
            for (trains, version, is_cold), heap in self._heaps.items()
            if (training or not trains)
            and (versions is None or version in versions)
            and (cold or not is_cold)
        ]
        return self._waiting[min(tops)[1]][0] if tops else None

    def versions(self) -> set[int | None]:
        """Return the versions whose engines have waiting requests."""
        return {version for _, version, _ in self._heaps}

    def version_of(self, request: RequestRecord) -> int | None:
        """Return the version whose engines alone may take this waiting request."""
        return self._waiting[request.request_id][1][1]

    def is_cold(self, request: RequestRecord) -> bool:
        """Return whether this waiting request needs room."""
        return self._waiting[request.request_id][1][2]

    def count_of(self, version: int | None) -> int:
        """Return the number of requests that only engines of this version may take."""
        return self._of[version]

    def of_version(self, version: int | None) -> list[RequestRecord]:
        """Return the requests that only engines of this version may take, in order of id."""
        if version not in self.versions():
            return []
        found = [request for request, (_, of, _) in self._waiting.values() if of == version]
        return sorted(found, key=lambda request: request.request_id)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[RequestRecord]:
        """Iterate over the requests in no particular order."""
        return (request for request, _ in self._waiting.values())

    def places(self) -> Iterator[tuple[Place, RequestRecord]]:
        """Yield every request with its place, to check the invariants."""
        for key, heap in self._heaps.items():
            for place, request_id in heap:
                if self._waits_under(request_id, key):
                    yield place, self._waiting[request_id][0]

    def _waits_under(self, request_id: int, key: _QueueKey) -> bool:
        found = self._waiting.get(request_id)
        return found is not None and found[1] == key


class MustDeliver:
    """Groups that the next batch must contain; empty unless the staleness rule is "finish"."""

    def __init__(self, gate: Staleness) -> None:
        self._gate = gate
        self._version: int | None = None
        self._growing: dict[int, GroupRecord] = {}
        """Groups that were incomplete at their last check."""
        self._waiting: dict[int, GroupRecord] = {}
        """Groups that were not accepted at their last check."""

    def has(self, group: GroupRecord, version: int) -> bool:
        """Return whether the batch that `version` consumes must contain the group."""
        if not self._gate.finishes or group.evaluation_id is not None:
            return False
        return self._gate.due(group.oldest_version, version)

    def note(self, group: GroupRecord, version: int) -> None:
        """Check a group whose tokens or versions have changed."""
        if not group.accepted and self.has(group, version):
            self._waiting[group.group_id] = group
            if not group.complete:
                self._growing[group.group_id] = group

    def grows(self, groups: Mapping[int, GroupRecord], version: int) -> bool:
        """Return whether one of the `groups` in flight that is due is incomplete."""
        self._follow(groups, version)
        return self._any(self._growing, groups, lambda group: not group.complete)

    def waits(self, groups: Mapping[int, GroupRecord], version: int) -> bool:
        """Return whether one of the `groups` in flight that is due is not accepted."""
        self._follow(groups, version)
        return self._any(self._waiting, groups, lambda group: not group.accepted)

    def waiting(self, groups: Mapping[int, GroupRecord], version: int) -> list[GroupRecord]:
        """Return the due groups in flight that are not accepted."""
        self._follow(groups, version)
        noted = [group for group_id, group in self._waiting.items() if group_id in groups]
        return [group for group in noted if not group.accepted and self.has(group, version)]

    def _follow(self, groups: Mapping[int, GroupRecord], version: int) -> None:
        if self._version != version and self._gate.finishes:
            self._version = version
            self._growing, self._waiting = {}, {}
            for group in groups.values():
                self.note(group, version)

    def _any(
        self,
        noted: dict[int, GroupRecord],
        groups: Mapping[int, GroupRecord],
        lacks: Callable[[GroupRecord], bool],
    ) -> bool:
        while noted:
            group_id, group = next(reversed(noted.items()))
            if group_id in groups and lacks(group) and self.has(group, self._version or 0):
                return True
            # A group without its oldest tokens is noted again if it gets tokens that old.
            noted.popitem()
        return False
