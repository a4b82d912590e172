"""Ordered collections: complete groups, waiting requests, and groups that a batch must contain."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeAlias, overload

from aprilsched.core.policies.resume_order import Place
from aprilsched.core.policies.staleness import Staleness
from aprilsched.core.state.records import GroupRecord, RequestRecord

__all__ = ["MustDeliver", "Ready", "Waiting"]

_Lane: TypeAlias = tuple[bool, int | None]
"""Whether a request is one of training, and the version whose engines may take it."""


class Ready(Sequence[GroupRecord]):
    """Complete groups that wait for their batch.

    A complete group does not grow, so its numbers of samples and tokens are counted when it comes
    and when it goes.
    """

    def __init__(self) -> None:
        self._groups: list[GroupRecord] = []
        self.samples = 0
        """Number of rollouts in these groups."""
        self.tokens = 0
        """Number of tokens in these groups."""

    def add(self, group: GroupRecord) -> None:
        self._groups.append(group)
        self.samples += len(group.members)
        self.tokens += group.tokens

    def put_back(self, groups: Sequence[GroupRecord]) -> None:
        """Put groups back in front, after the offer of their batch was withdrawn."""
        self._groups[:0] = groups
        self.samples += sum(len(group.members) for group in groups)
        self.tokens += sum(group.tokens for group in groups)

    def remove(self, group: GroupRecord) -> None:
        self._groups.remove(group)
        self.samples -= len(group.members)
        self.tokens -= group.tokens

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[GroupRecord]:
        return iter(self._groups)

    @overload
    def __getitem__(self, index: int) -> GroupRecord: ...
    @overload
    def __getitem__(self, index: slice) -> list[GroupRecord]: ...
    def __getitem__(self, index: int | slice) -> GroupRecord | list[GroupRecord]:
        return self._groups[index]


class Waiting:
    """Requests that wait to be sent, ordered by the `place` of each. Requests of evaluations can
    be taken alone, and so can those of some versions.

    Args:
        place: the sort key of a request that begins to wait.
        version: the version whose engines alone may take a request; None for the newest version.
    """

    def __init__(
        self,
        place: Callable[[RequestRecord], Place],
        version: Callable[[RequestRecord], int | None] = lambda _: None,
    ) -> None:
        self._place = place
        self._version = version
        self._waiting: dict[int, tuple[RequestRecord, _Lane]] = {}
        self._heaps: dict[_Lane, list[tuple[Place, int]]] = {}

    def add(self, request: RequestRecord) -> None:
        lane = (request.rollout.group.evaluation_id is None, self._version(request))
        self._waiting[request.request_id] = (request, lane)
        heap = self._heaps.setdefault(lane, [])
        heapq.heappush(heap, (self._place(request), request.request_id))

    def discard(self, request: RequestRecord) -> None:
        """Remove a request. It leaves the inside of the heap later, when it comes to the top."""
        _, lane = self._waiting.pop(request.request_id, (None, None))
        if lane is None:
            return
        heap = self._heaps[lane]
        while heap and not self._in_lane(heap[0][1], lane):
            heapq.heappop(heap)
        if not heap:
            del self._heaps[lane]

    def first(
        self, *, training: bool, versions: Collection[int | None] | None = None
    ) -> RequestRecord | None:
        """The request to send next; without `training` the next one of an evaluation. With
        `versions` it is one of theirs."""
        tops = [
            heap[0]
            for (trains, version), heap in self._heaps.items()
            if (training or not trains) and (versions is None or version in versions)
        ]
        return self._waiting[min(tops)[1]][0] if tops else None

    def versions(self) -> set[int | None]:
        """The versions whose engines are waited for."""
        return {version for _, version in self._heaps}

    def version_of(self, request: RequestRecord) -> int | None:
        """The version whose engines the waiting request waits for."""
        return self._waiting[request.request_id][1][1]

    def of_version(self, version: int | None) -> list[RequestRecord]:
        """The requests that only engines of this version may take, in the order of their ids."""
        if version not in self.versions():
            return []
        found = [request for request, (_, of) in self._waiting.values() if of == version]
        return sorted(found, key=lambda request: request.request_id)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[RequestRecord]:
        """Every request, in no particular order."""
        return (request for request, _ in self._waiting.values())

    def places(self) -> Iterator[tuple[Place, RequestRecord]]:
        """Every request with its place, for the check of the invariants."""
        for lane, heap in self._heaps.items():
            for place, request_id in heap:
                if self._in_lane(request_id, lane):
                    yield place, self._waiting[request_id][0]

    def _in_lane(self, request_id: int, lane: _Lane) -> bool:
        found = self._waiting.get(request_id)
        return found is not None and found[1] == lane


class MustDeliver:
    """Groups that the next batch must contain. It is empty under every other staleness rule."""

    def __init__(self, gate: Staleness) -> None:
        self._gate = gate
        self._version: int | None = None
        self._candidates: dict[int, GroupRecord] = {}

    def has(self, group: GroupRecord, version: int) -> bool:
        """Whether the group must be in the batch that `version` consumes."""
        if not self._gate.finishes or group.evaluation_id is not None:
            return False
        return self._gate.due(group.oldest_version, version)

    def note(self, group: GroupRecord, version: int) -> None:
        """Look at a group whose tokens or versions have changed."""
        if self.has(group, version):
            self._candidates[group.group_id] = group

    def open(self, groups: Mapping[int, GroupRecord], version: int) -> Iterator[GroupRecord]:
        """The groups among `groups`, those in flight, that the batch must contain."""
        if not self._gate.finishes:
            return
        if self._version != version:
            self._version = version
            self._candidates = {g.group_id: g for g in groups.values() if self.has(g, version)}
        for group_id, group in list(self._candidates.items()):
            if group_id not in groups:
                del self._candidates[group_id]
            elif self.has(group, version):
                yield group
