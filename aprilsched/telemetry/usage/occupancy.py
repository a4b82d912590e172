"""What each engine is at, from events and commands, and where its time has gone so far.

Invariants: an engine's stretches (times in which nothing changes) follow each other without a gap,
from the opening (or from when it joined) to the last call of :meth:`Occupancy.advance`; a request
is with an engine from its Send to its first end.

A request whose KV was dropped in a pause shows nothing until its next chunk, which may be many
steps of decoding later. So of that time, what the chunk's tokens take at the engine's own pace is
decoding: it is moved there once the chunk is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import EngineInfo, Event
from aprilsched.telemetry.base import Chunks
from aprilsched.telemetry.dispatching import DispatchingListener
from aprilsched.telemetry.usage.at_work import (
    At,
    EngineAtWork,
    Moved,
    Recording,
    RequestAtWork,
)
from aprilsched.telemetry.usage.awaited import Awaited
from aprilsched.telemetry.usage.parts import PART_INDEX, Cause, EngineState, Stretch, add_seconds

__all__ = ["Occupancy"]

_PACE_WEIGHT = 0.1
"""Of a new chunk in an engine's mean pace: some dozens of chunks are remembered."""
_PACERS = 8
"""Requests of an engine whose chunks tell its pace: they are all alike, and a look at each chunk of
hundreds would be most of what all of this costs."""


class Occupancy(DispatchingListener):
    """Adds up each engine's time, and shows what it consists of to `recording`.

    `batch_groups` is that of the scheduler; None is learnt from the first batch.
    """

    def __init__(
        self, *, batch_groups: int | None = None, recording: Recording | None = None
    ) -> None:
        super().__init__()
        self.engines: dict[str, EngineAtWork] = {}
        """By name, in the order in which they came; those that are out of use stay."""
        self._recording = recording
        self._awaited = Awaited(batch_groups=batch_groups)
        self._requests: dict[int, RequestAtWork] = {}
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

    def decoding(self) -> Iterator[int]:
        """The rollouts that grow now, on engines that generate."""
        for request in self._requests.values():
            if request.at == "decode" and request.engine.state == "generating":
                yield request.rollout_id

    def advance(self, now: float) -> None:
        """End the stretches that are under way, and begin new ones."""
        self._now = now
        for engine in self.engines.values():
            self._cut(engine)

    def hear(self, what: Event | Command, now: float) -> None:
        kind = type(what)
        self._now = now
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(what)
        handler = self._awaited.handlers.get(kind)
        if handler is not None:
            handler(what)
            if self._awaited.changed:
                self._ask()

    def _ask(self) -> None:
        """Whether what the fleet waits for is something else now."""
        fleet = self._awaited
        fleet.changed = False
        if (fleet.free, fleet.paused, fleet.outside) != (self._free, self._paused, self._outside):
            self.advance(self._now)
            self._free, self._paused, self._outside = fleet.free, fleet.paused, fleet.outside

    def _cut(self, engine: EngineAtWork) -> None:
        """What follows is another stretch."""
        begin, end = engine.since, self._now
        if end <= begin:
            return
        engine.since = end
        state = engine.state
        idle = self._free if state == "generating" else self._paused
        counts = (engine.decode, engine.prefill, engine.re_prefill)
        environment = self._outside / self._in_use() if self._outside else 0.0
        add_seconds(engine.seconds, end - begin, state, idle, counts, environment, engine.peak)
        if self._recording is not None:
            self._recording.stretch(
                Stretch(engine.name, begin, end, state, idle, *counts, environment)
            )

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
        request_id, context = command.request_id, len(command.input_ids)
        self._close(request_id)
        self._cut(engine)
        at: At = "re_prefill" if command.attempt > 1 else "prefill"
        paces = engine.pacers < _PACERS
        self._requests[request_id] = RequestAtWork(
            attempt=command.attempt,
            rollout_id=command.rollout_id,
            engine=engine,
            at=at,
            context=context,
            since=self._now,
            paces=paces,
        )
        engine.count(at, 1)
        engine.beyond += context
        engine.pacers += paces
        engine.peak = max(engine.peak, engine.in_flight)

    def on_progress(self, chunks: Chunks, now: float) -> None:
        # The most frequent thing of all, so in one loop: calls would take as long as the rest.
        requests = self._requests
        for event, at in chunks:
            request = requests.get(event.request_id)
            if request is None or request.attempt != event.attempt:
                continue
            tokens = len(event.token_ids)
            request.context += tokens
            request.engine.tokens += tokens
            if request.watched:
                self._watch(request, tokens, at)
        self._now = now

    def _progress(self, event: ev.Progress) -> None:
        self.on_progress([(event, self._now)], self._now)

    def _watch(self, request: RequestAtWork, tokens: int, now: float) -> None:
        """A chunk that ends a wait, or tells the pace."""
        engine = request.engine
        took, request.since = now - request.since, now
        if request.at != "decode":
            self._now = now
            self._first_chunk(request, request.at, tokens, took)
        elif tokens:
            pace = took / tokens
            engine.pace += (pace - engine.pace) * (_PACE_WEIGHT if engine.pace else 1.0)

    def _first_chunk(
        self,
        request: RequestAtWork,
        part: Literal["prefill", "re_prefill"],
        tokens: int,
        took: float,
    ) -> None:
        """Some of the time since it was sent or let go on was decoding."""
        engine = request.engine
        self._change(request, "decode")
        # Where responses come in one piece the pace is never known: one token's time is prefill.
        known = tokens * engine.pace if engine.pace else took * (1 - 1 / max(1, tokens))
        decoding = min(took, known)
        if not decoding:
            return
        seconds, wrong = engine.seconds, PART_INDEX[part]
        moved = min(seconds[wrong], decoding / max(1, engine.peak))
        seconds[wrong] -= moved
        seconds[PART_INDEX["decode"]] += moved
        if self._recording is not None:
            self._recording.moved(
                Moved(engine=engine.name, time=self._now, part=part, slot_seconds=decoding)
            )

    def _finished(self, event: ev.Finished) -> None:
        request = self._requests.get(event.request_id)
        self._came_back(event)
        if request is not None and request.attempt == event.attempt:
            self._awaited.finished(request.rollout_id)
            if self._awaited.changed:
                self._ask()

    def _came_back(self, event: ev.Finished | ev.Interrupted | ev.Failed) -> None:
        request = self._requests.get(event.request_id)
        if request is not None and request.attempt == event.attempt:
            self._close(event.request_id)

    def _close(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            engine = request.engine
            self._cut(engine)
            engine.count(request.at, -1)
            engine.beyond -= request.context
            engine.pacers -= request.paces

    def _change(self, request: RequestAtWork, at: At) -> None:
        self._cut(request.engine)
        request.engine.count(request.at, -1)
        request.engine.count(at, 1)
        request.at = at
        request.watched = at != "decode" or request.paces

    # --- engines -------------------------------------------------------------------------------

    def _opened(self, event: ev.Opened) -> None:
        """Of this process: what a former one had in its engines is gone."""
        self.advance(self._now)
        self._requests.clear()
        for engine in self.engines.values():
            engine.state = "lost"
            engine.decode = engine.prefill = engine.re_prefill = engine.pacers = 0
            engine.beyond = -engine.tokens
        for info in event.engines:
            self._enlist(info).state = "generating"

    def _joined(self, event: ev.EngineJoined) -> None:
        """It takes part once it is admitted."""
        engine = self._enlist(event.info)
        self._enter(engine, "lost")

    def _enlist(self, info: EngineInfo) -> EngineAtWork:
        engine = self.engines.get(info.name)
        if engine is None:
            engine = EngineAtWork(info=info, version=info.version, since=self._now)
            self.engines[info.name] = engine
        engine.info, engine.version = info, info.version
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
