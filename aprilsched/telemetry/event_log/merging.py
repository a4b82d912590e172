"""Makes one event log of those of a run in shards, so that everything that reads a log can read it.

The collector's log has the batches, the updates, and which shard was opened or lost when. Each
opening of a shard has a log of its own, whose times begin with that opening. In the log that is
made, ids and names of engines are qualified as those of delivered groups are, a shard that is lost
is a loss of its engines, and what the shards say of batches of their own is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from aprilsched.core.messages import facts as of
from aprilsched.core.messages.events import EngineInfo
from aprilsched.core.messages.facts import Fact
from aprilsched.core.state.ledger import Reason
from aprilsched.errors import RunFolderError
from aprilsched.telemetry.event_log.reading import read_facts
from aprilsched.telemetry.event_log.writing import EventLog
from aprilsched.telemetry.run_folder import EVENTS
from aprilsched.telemetry.run_state import RunState

SHARDS = "shards"
"""Name of the folder of the shards' logs."""
SLOTS = 4096
"""Number of slots. A shard has a slot, and so has each shard that takes its place without its
store, because its ids begin again."""

_IDS = ("group_id", "rollout_id", "request_id", "evaluation_id", "culprit")
_OF_THE_COLLECTOR = frozenset(
    {
        of.BatchDelivered,
        of.BatchOffered,
        of.BatchRequestWithdrawn,
        of.BatchRequested,
        of.BatchesAcknowledged,
        of.OfferWithdrawn,
        of.PromptsEnded,
        of.PromptsReceived,
        of.PromptsRequested,
        of.UpdateBegun,
        of.UpdateFinished,
        of.UpdateWanted,
        of.UpdateWithdrawn,
    }
)
"""What the collector says for all shards."""

_Line: TypeAlias = tuple[Sequence[Fact], float]
_Ordered: TypeAlias = "tuple[float, int, int, _Opening | None, Sequence[Fact]]"
"""Facts of a log with their time, the order of what has the same time, and the shard."""


class _Opening(NamedTuple):
    shard: str
    slot: int
    opening: int
    at: float


def qualified_id(local: int, slot: int) -> int:
    """An id that no other shard gives, for an id that a shard has given."""
    return local * SLOTS + slot


def qualified_engine(engine: str, shard: str) -> str:
    """A name that no engine of another shard has."""
    return f"{shard}/{engine}"


def shard_log(folder: Path, shard: str, opening: int) -> Path:
    """The event log of a shard that was opened for the `opening`-th time."""
    return folder / SHARDS / shard / f"{opening}.jsonl"


def merge_logs(folder: Path, path: Path) -> None:
    """Write the logs of the run in `folder` to `path`, as one.

    Raises:
        RunFolderError: if there are none, or if one is damaged before its end.
        OSError: if they cannot be read or written.
        ValueError, MsgspecError: if a line cannot be understood.
    """
    own = [(tuple(facts), at) for facts, at in read_facts(folder / EVENTS)]
    openings = [
        _Opening(fact.shard, fact.slot, fact.opening, at)
        for facts, at in own
        for fact in facts
        if isinstance(fact, of.ShardOpened)
    ]
    if not openings:
        raise RunFolderError(f"{folder} has no log of a run in shards; name the folder of one.")
    merger = _Merger(own)
    log = EventLog(path, patient=True)
    try:
        for facts, at in merger.lines(folder, openings):
            if facts:
                log.on_facts(facts, at)
        log.start()
    finally:
        log.close()
    if log.error is not None:
        raise RunFolderError(f"{path} cannot be written ({log.error}).")


class _Merger:
    """Translates the facts of the shards, and knows what is in flight in each."""

    def __init__(self, own: Sequence[_Line]) -> None:
        self._own = own
        self._state = RunState()
        self._handed: dict[int, set[int]] = {}
        """Groups of each slot that the shard has delivered to the collector."""
        self._requests: dict[int, set[int]] = {}
        """Requests of each slot with an open attempt."""
        self._engines: dict[str, dict[str, EngineInfo]] = {}
        """Engines of each shard that are in use, by their qualified names."""
        self._known: set[str] = set()
        self._slots: dict[str, int] = {}
        self._arrived = {
            group_id
            for facts, _ in own
            for fact in facts
            if isinstance(fact, of.BatchDelivered)
            for group_id in of.group_ids(fact.rollouts)
        }

    def lines(self, folder: Path, openings: Sequence[_Opening]) -> Iterator[_Line]:
        """The facts of the whole run with their times."""
        first = [opening for opening in openings if opening.opening == 1]
        yield (self._begin(folder, first),), 0.0
        streams = [self._stream_of_collector()]
        streams += [
            self._stream(shard_log(folder, each.shard, each.opening), each, number)
            for number, each in enumerate(openings, 1)
        ]
        for at, _, _, opening, facts in heapq.merge(*streams, key=lambda line: line[:3]):
            told = self._of_collector(facts) if opening is None else self._of(opening, facts)
            for part in of.by_delivery(tuple(told)):
                self._state.on_facts(part, at)
                yield part, at

    def _stream_of_collector(self) -> Iterator[_Ordered]:
        for place, (facts, at) in enumerate(self._own):
            yield at, 0, place, None, facts

    def _stream(self, path: Path, opening: _Opening, number: int) -> Iterator[_Ordered]:
        try:
            for place, (facts, at) in enumerate(read_facts(path)):
                yield opening.at + at, number, place, opening, facts
        except FileNotFoundError:
            return  # It is on another machine's disk, or was killed before its first line.

    def _begin(self, folder: Path, openings: Sequence[_Opening]) -> of.RunOpened:
        engines: list[EngineInfo] = []
        version = 0
        for each in openings:
            opened = _first(shard_log(folder, each.shard, each.opening))
            if opened is None:
                continue
            version = max(version, opened.version)
            engines += (_engine(info, each.shard) for info in opened.engines)
            self._note_opening(each, opened)
        return of.RunOpened(engines=tuple(engines), version=version)

    def _note_opening(self, opening: _Opening, opened: of.RunOpened) -> None:
        self._slots[opening.shard] = opening.slot
        found = {info.name: info for info in (_engine(e, opening.shard) for e in opened.engines)}
        self._engines[opening.shard] = found
        self._known |= found.keys()

    def _of_collector(self, facts: Sequence[Fact]) -> Iterator[Fact]:
        for fact in facts:
            yield fact
            if isinstance(fact, of.ShardLost):
                yield from self._lose(fact)

    def _lose(self, fact: of.ShardLost) -> Iterator[Fact]:
        slot = self._slots.get(fact.shard)
        for request_id in sorted(self._requests.pop(slot, ()) if slot is not None else ()):
            yield of.AttemptEnded(request_id=request_id, outcome="engine_lost", cause=fact.cause)
        for engine in self._engines.get(fact.shard, {}):
            yield of.EngineLost(engine=engine, cause=fact.cause)

    def _of(self, opening: _Opening, facts: Sequence[Fact]) -> Iterator[Fact]:
        """What the facts of one event of a shard are in the run."""
        for fact in facts:
            if not isinstance(fact, of.RunOpened):
                yield from self._of_one(opening, fact)
            elif opening.opening > 1:
                restored = {
                    qualified_id(each.group_id, opening.slot)
                    for each in facts
                    if isinstance(each, of.GroupLaunched)
                }
                yield from self._open_again(opening, fact, restored)

    def _of_one(self, opening: _Opening, fact: Fact) -> Iterator[Fact]:
        if isinstance(fact, of.BatchDelivered):
            groups = {qualified_id(each, opening.slot) for each in of.group_ids(fact.rollouts)}
            self._handed.setdefault(opening.slot, set()).update(groups)
        if type(fact) in _OF_THE_COLLECTOR:
            return
        fact = _qualified(fact, opening.shard, opening.slot)
        requests = self._requests.setdefault(opening.slot, set())
        if isinstance(fact, of.AttemptSent):
            requests.add(fact.request_id)
        elif isinstance(fact, of.AttemptEnded):
            requests.discard(fact.request_id)
        elif isinstance(fact, of.GroupLaunched) and fact.restored is not None:
            yield from self._restore(fact, fact.restored)
            return
        yield fact

    def _open_again(
        self, opening: _Opening, opened: of.RunOpened, restored: set[int]
    ) -> Iterator[Fact]:
        before = self._slots.get(opening.shard, opening.slot)
        if before == opening.slot:
            keep = restored | self._handed.get(before, set())
        else:
            # It begins again without its store, so what has not arrived will not arrive.
            keep = self._arrived
        yield from self._drop_lost(before, keep)
        known = set(self._known)
        self._note_opening(opening, opened)
        for name, info in self._engines[opening.shard].items():
            if name not in known:
                yield of.EngineJoined(info=info)
            if info.version == opened.version:
                yield of.EngineAdmitted(engine=name, version=opened.version)

    def _drop_lost(self, slot: int, keep: set[int]) -> Iterator[Fact]:
        """Enter the groups of a slot into the ledger that are in flight nowhere."""
        for group_id, group in list(self._state.groups.items()):
            if group_id % SLOTS == slot and group_id not in keep:
                yield self._dropped(group_id, group.rollout_ids)

    def _dropped(self, group_id: int, rollout_ids: Sequence[int]) -> of.GroupDropped:
        return of.GroupDropped(
            group_id=group_id,
            reason=Reason.RESTARTED,
            cause="its shard has ended and had not saved it",
            rollouts=tuple(
                of.DroppedRollout(
                    rollout_id=each,
                    reason=Reason.RESTARTED,
                    tokens=self._state.rollouts[each].sampled,
                )
                for each in rollout_ids
            ),
        )

    def _restore(self, fact: of.GroupLaunched, lengths: of.RestoredLengths) -> Iterator[Fact]:
        """A group is in flight again, with the tokens that were saved of it."""
        if fact.group_id not in self._state.groups:
            yield fact
            return
        known = self._state.groups[fact.group_id].rollout_ids
        if set(known) != set(fact.rollout_ids):
            # A member was lost, or took the place of a lost one, after the group was saved.
            yield self._dropped(fact.group_id, known)
            yield fact
            return
        for place, rollout_id in enumerate(fact.rollout_ids):
            rollout = self._state.rollouts[rollout_id]
            lost = rollout.sampled - lengths.sampled[place]
            environment = rollout.environment - (lengths.tokens[place] - lengths.sampled[place])
            if lost > 0 or environment > 0:
                yield of.TokensDiscarded(
                    rollout_id=rollout_id,
                    sampled=max(0, lost),
                    environment=max(0, environment),
                    reason=Reason.RESTARTED,
                )


def _first(path: Path) -> of.RunOpened | None:
    """The opening that a log begins with."""
    try:
        for facts, _ in read_facts(path, tokens=False):
            for fact in facts:
                if isinstance(fact, of.RunOpened):
                    return fact
    except FileNotFoundError:
        return None
    return None


def _qualified(fact: Fact, shard: str, slot: int) -> Fact:
    changes: dict[str, Any] = {}
    for name in _fields(type(fact)):
        value: Any = getattr(fact, name)
        if value is None:
            continue
        if name in _IDS:
            changes[name] = qualified_id(value, slot)
        elif name in ("rollout_ids", "evaluations"):
            changes[name] = tuple(qualified_id(each, slot) for each in value)
        elif name == "engine":
            changes[name] = qualified_engine(value, shard)
        elif name == "engines":
            changes[name] = tuple(qualified_engine(each, shard) for each in value)
        elif name in ("failed", "lost"):
            changes[name] = tuple((qualified_engine(each, shard), why) for each, why in value)
        elif name == "info" and isinstance(value, EngineInfo):
            changes[name] = _engine(value, shard)
        elif name == "rollouts":
            changes[name] = tuple(_rollout(each, shard, slot) for each in value)
    return msgspec.structs.replace(fact, **changes) if changes else fact


@cache
def _fields(kind: type[Fact]) -> tuple[str, ...]:
    """The fields of a fact that name something of its shard."""
    ours = {*_IDS, "rollout_ids", "evaluations", "engine", "engines", "failed", "lost", "info"}
    ours.add("rollouts")
    return tuple(name for name in kind.__struct_fields__ if name in ours)


def _rollout(each: Any, shard: str, slot: int) -> Any:
    changes: dict[str, Any] = {"rollout_id": qualified_id(each.rollout_id, slot)}
    if isinstance(each, of.DeliveredRollout):
        changes["group_id"] = qualified_id(each.group_id, slot)
        changes["segments"] = tuple(
            (start, end, version, None if engine is None else qualified_engine(engine, shard))
            for start, end, version, engine in each.segments
        )
    return msgspec.structs.replace(each, **changes)


def _engine(info: EngineInfo, shard: str) -> EngineInfo:
    return replace(info, name=qualified_engine(info.name, shard))
