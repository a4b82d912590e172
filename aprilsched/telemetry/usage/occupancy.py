"""What each engine is at, from events and commands: stretches of time in which nothing changes.

Invariants: an engine's stretches follow each other without a gap, from the opening (or from when it
joined) to the last call of :meth:`Occupancy.advance`; a request is with an engine from its Send to
its first end.

A request whose KV was dropped in a pause shows nothing until its next chunk, which may be many
steps of decoding later. So of that time, what the chunk's tokens take at the engine's own pace is
decoding: `moved` is told, once the chunk is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aprilsched.core import commands as do
from aprilsched.core import events as ev
from aprilsched.core.commands import Command
from aprilsched.core.events import EngineInfo, Event
from aprilsched.telemetry.base import Chunks
from aprilsched.telemetry.dispatching import DispatchingListener
from aprilsched.telemetry.usage.awaited import Awaited
from aprilsched.telemetry.usage.parts import Cause, EngineState, Stretch

__all__ = ["EngineAtWork", "Moved", "Occupancy"]

_At: TypeAlias = Literal["decode", "prefill", "re_prefill"]

_PACE_WEIGHT = 0.1
"""Of a new chunk in an engine's mean pace: some dozens of chunks are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Slot-seconds of `engine` up to `time` that were counted under `part`, and were decoding."""

    engine: str
    time: float
    part: Literal["prefill", "re_prefill"]
    slot_seconds: float


@dataclass(slots=True, kw_only=True, eq=False)
class EngineAtWork:
    """An engine now."""

    name: str
    version: int | None
    since: float
    """Of its stretch that is under way."""
    state: EngineState = "generating"
    counts: dict[_At, int] = field(
        default_factory=lambda: {"decode": 0, "prefill": 0, "re_prefill": 0}
    )
    """Its requests, by what they are at."""
    peak: int = 0
    """Requests that it had at once."""
    tokens: int = 0
    """That it generated so far."""
    pace: float = 0.0
    """Seconds a token of one request, a running mean; 0 until two chunks of one were seen."""
    drops_kv: bool = True
    """In the pause that is under way."""
    lent: frozenset[str] = frozenset()
    """Tags of the memory that the trainer has."""

    @property
    def in_flight(self) -> int:
        return sum(self.counts.values())


@dataclass(slots=True, kw_only=True)
class _Request:
    attempt: int
    engine: EngineAtWork
    at: _At
    since: float
    """Its last sign of life: sent, let go on, or a chunk."""


class Occupancy(DispatchingListener):
    """Gives each stretch to `told` when it ends, and what was counted wrongly to `moved`.

    `batch_groups` is that of the scheduler; None is learnt from the first batch.
    """

    def __init__(
        self,
        told: Callable[[Stretch], None],
        moved: Callable[[Moved], None],
        *,
        batch_groups: int | None = None,
    ) -> None:
        super().__init__()
        self.engines: dict[str, EngineAtWork] = {}
        """By name, in the order in which they came; those that are out of use stay."""
        self._told = told
        self._moved = moved
        self._awaited = Awaited(batch_groups=batch_groups)
        self._requests: dict[int, _Request] = {}
        self._seen: set[int] = set()
        """Requests that were sent before, and are not finished."""
        self._free: Cause = self._awaited.free
        self._paused: Literal["pause", "trainer"] = self._awaited.paused
        self._outside = 0
        self._handlers = {
            ev.Opened: self._opened,
            ev.Progress: self._progress,
            ev.Finished: self._finished,
            ev.Interrupted: self._came_back,
            ev.Failed: self._came_back,
            ev.Refitted: self._refitted,
            ev.Woken: self._woken,
            ev.Continued: self._continued,
            ev.EngineJoined: self._joined,
            do.Send: self._send,
            do.Pause: self._pause,
            do.Flush: self._flush,
            do.Refit: self._refit,
            do.Release: self._release,
            do.LoseEngine: self._lose,
            do.AdmitEngine: self._admit,
        }

    @property
    def groups_ready(self) -> int:
        """Groups that are complete, and wait for their batch."""
        return self._awaited.ready

    @property
    def outside(self) -> int:
        """Episodes that have nothing for an engine at the moment."""
        return self._outside

    def decodes(self, request_id: int) -> bool:
        """The request grows now."""
        request = self._requests.get(request_id)
        return (
            request is not None and request.at == "decode" and request.engine.state == "generating"
        )

    def advance(self, now: float) -> None:
        """End the stretches that are under way, and begin new ones."""
        self._now = now
        for engine in self.engines.values():
            self._cut(engine)

    def hear(self, what: Event | Command, now: float) -> None:
        super().hear(what, now)
        if type(what) is ev.Progress:
            return  # two thirds of all, and nobody waits for less or more because of it
        self._awaited.hear(what, now)
        fleet = self._awaited
        if (fleet.free, fleet.paused, fleet.outside) != (self._free, self._paused, self._outside):
            self.advance(now)
            self._free, self._paused, self._outside = fleet.free, fleet.paused, fleet.outside

    def _cut(self, engine: EngineAtWork) -> None:
        """What follows is another stretch."""
        if self._now <= engine.since:
            return
        counts = engine.counts
        self._told(
            Stretch(
                engine=engine.name,
                start=engine.since,
                end=self._now,
                state=engine.state,
                idle=self._free if engine.state == "generating" else self._paused,
                decode=counts["decode"],
                prefill=counts["prefill"],
                re_prefill=counts["re_prefill"],
                environment=self._outside / self._in_use() if self._outside else 0.0,
            )
        )
        engine.since = self._now

    def _in_use(self) -> int:
        return max(1, sum(engine.state != "lost" for engine in self.engines.values()))

    def _enter(self, engine: EngineAtWork, state: EngineState) -> None:
        if engine.state != state:
            self._cut(engine)
            engine.state = state

    # --- requests ------------------------------------------------------------------------------

    def _send(self, command: do.Send) -> None:
        engine = self.engines.get(command.engine)
        if engine is None:
            return
        self._close(command.request_id)
        again = command.attempt > 1 or command.request_id in self._seen
        self._seen.add(command.request_id)
        self._cut(engine)
        at: _At = "re_prefill" if again else "prefill"
        self._requests[command.request_id] = _Request(
            attempt=command.attempt, engine=engine, at=at, since=self._now
        )
        engine.counts[at] += 1
        engine.peak = max(engine.peak, engine.in_flight)

    def on_progress(self, chunks: Chunks, now: float) -> None:
        # The most frequent thing of all, so in one loop: calls would take as long as the rest.
        requests = self._requests
        for event, at in chunks:
            request = requests.get(event.request_id)
            if request is None or request.attempt != event.attempt:
                continue
            engine, tokens = request.engine, len(event.token_ids)
            engine.tokens += tokens
            took, request.since = at - request.since, at
            if request.at != "decode":
                self._now = at
                self._first_chunk(request, tokens, took)
            elif tokens:
                pace = took / tokens
                engine.pace += (pace - engine.pace) * (_PACE_WEIGHT if engine.pace else 1.0)
        self._now = now

    def _progress(self, event: ev.Progress) -> None:
        self.on_progress([(event, self._now)], self._now)

    def _first_chunk(self, request: _Request, tokens: int, took: float) -> None:
        """Some of the time since it was sent or let go on was decoding."""
        engine = request.engine
        # Where responses come in one piece the pace is never known: one token's time is prefill.
        known = tokens * engine.pace if engine.pace else took * (1 - 1 / max(1, tokens))
        decoding = min(took, known)
        if decoding:
            part: Literal["prefill", "re_prefill"] = (
                "prefill" if request.at == "prefill" else "re_prefill"
            )
            self._cut(engine)
            self._moved(Moved(engine=engine.name, time=self._now, part=part, slot_seconds=decoding))
        self._change(request, "decode")

    def _finished(self, event: ev.Finished) -> None:
        self._seen.discard(event.request_id)
        self._came_back(event)

    def _came_back(self, event: ev.Finished | ev.Interrupted | ev.Failed) -> None:
        request = self._requests.get(event.request_id)
        if request is not None and request.attempt == event.attempt:
            self._close(event.request_id)

    def _close(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._cut(request.engine)
            request.engine.counts[request.at] -= 1

    def _change(self, request: _Request, at: _At) -> None:
        self._cut(request.engine)
        request.engine.counts[request.at] -= 1
        request.engine.counts[at] += 1
        request.at = at

    # --- engines -------------------------------------------------------------------------------

    def _opened(self, event: ev.Opened) -> None:
        """Of this process: what a former one had in its engines is gone."""
        self.advance(self._now)
        self._requests.clear()
        self._seen.clear()
        for engine in self.engines.values():
            engine.state = "lost"
            engine.counts = dict.fromkeys(engine.counts, 0)
        for info in event.engines:
            self._enlist(info).state = "generating"

    def _joined(self, event: ev.EngineJoined) -> None:
        """It takes part once it is admitted."""
        engine = self._enlist(event.info)
        self._enter(engine, "lost")

    def _enlist(self, info: EngineInfo) -> EngineAtWork:
        engine = self.engines.get(info.name)
        if engine is None:
            engine = EngineAtWork(name=info.name, version=info.version, since=self._now)
            self.engines[info.name] = engine
        engine.version = info.version
        return engine

    def _admit(self, command: do.AdmitEngine) -> None:
        engine = self.engines.get(command.engine)
        if engine is not None:
            engine.version = command.version
            self._enter(engine, "generating")

    def _lose(self, command: do.LoseEngine) -> None:
        engine = self.engines.get(command.engine)
        if engine is None:
            return
        for request_id in [i for i, r in self._requests.items() if r.engine is engine]:
            self._close(request_id)
        engine.lent = frozenset()
        self._enter(engine, "lost")

    def _pause(self, command: do.Pause) -> None:
        engine = self.engines.get(command.engine)
        if engine is not None and engine.state != "lost":
            engine.drops_kv = command.mode == "retract"
            self._enter(engine, "paused")

    def _flush(self, command: do.Flush) -> None:
        engine = self.engines.get(command.engine)
        if engine is not None:
            engine.drops_kv = True

    def _refit(self, command: do.Refit) -> None:
        if command.beside:
            return
        for name in command.engines:
            engine = self.engines.get(name)
            if engine is not None and engine.state == "paused":
                self._enter(engine, "refitting")

    def _refitted(self, event: ev.Refitted) -> None:
        engine = self.engines.get(event.engine)
        if engine is None:
            return
        engine.version = event.version
        if engine.state == "refitting":
            self._enter(engine, "paused")

    def _release(self, command: do.Release) -> None:
        engine = self.engines.get(command.engine)
        if engine is not None and engine.state != "lost":
            engine.lent |= set(command.tags)
            engine.drops_kv = True
            self._enter(engine, "asleep")

    def _woken(self, event: ev.Woken) -> None:
        engine = self.engines.get(event.engine)
        if engine is None:
            return
        engine.lent -= set(event.tags)
        if not engine.lent and engine.state == "asleep":
            self._enter(engine, "paused")

    def _continued(self, event: ev.Continued) -> None:
        engine = self.engines.get(event.engine)
        if engine is None or engine.state == "lost":
            return
        self._enter(engine, "generating")
        for request in self._requests.values():
            if request.engine is engine:
                request.since = self._now
                if request.at == "decode" and engine.drops_kv:
                    self._change(request, "re_prefill")
