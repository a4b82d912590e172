"""Where the time of each engine goes: the sums behind the usage of engine time.

Invariants: an engine's stretches (times in which nothing changes) follow each other without a gap,
from the opening (or from when it joined) to the last call of :meth:`EngineTime.advance`; each
moment is divided by the slots that the engine had shown until then.

A request whose KV was dropped in a pause shows nothing until its next chunk, which may be many
steps of decoding later. So of that time, what the chunk's tokens take at the engine's own rate is
decoding: it is moved there once the chunk has come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

from aprilsched.core.messages.events import EngineInfo
from aprilsched.telemetry.usage.parts import (
    PART_INDEX,
    PARTS,
    Cause,
    EngineState,
    Stretch,
    add_seconds,
)

__all__ = ["AttemptNow", "EngineNow", "EngineTime", "Moved", "Phase", "Recording"]

Phase: TypeAlias = Literal["decode", "prefill", "re_prefill"]

_RATE_WEIGHT = 0.1
"""Of a new chunk in an engine's mean rate: some dozens of chunks are remembered."""
_TIMED = 8
"""Requests of an engine whose chunks tell its rate: they are all alike, and a look at each chunk of
hundreds would be most of what all of this costs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Slot-seconds of `engine` up to `time` that were counted under `part`, and were decoding."""

    engine: str
    time: float
    part: Literal["prefill", "re_prefill"]
    slot_seconds: float


class Recording(Protocol):
    """Is given each stretch, where the sums alone are not enough."""

    def stretch(self, stretch: Stretch) -> None:
        """This stretch has ended."""
        ...

    def moved(self, moved: Moved) -> None:
        """Some of an earlier stretch was decoding."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class EngineNow:
    """An engine as it is now.

    Attributes:
        info: what it said of itself when it came.
        seconds: its time so far in the order of PARTS.
        peak: the most requests that it had at once.
        tokens: the tokens that it has generated so far.
    """

    info: EngineInfo
    version: int | None
    since: float
    """When its stretch that goes on began."""
    state: EngineState = "generating"
    decode: int = 0
    prefill: int = 0
    re_prefill: int = 0
    """Its requests in each phase."""
    peak: int = 0
    tokens: int = 0
    beyond: int = 0
    """Tokens of its requests' contexts, less `tokens`: a chunk changes both, and this not."""
    seconds_per_token: float = 0.0
    """Of one request, a running mean; 0 until two chunks of one have come."""
    timed: int = 0
    """Its requests whose chunks tell that."""
    drops_kv: bool = True
    """The pause that goes on leaves its requests without their KV."""
    released: frozenset[str] = frozenset()
    """Tags of the memory that the trainer has."""
    waking: frozenset[str] = frozenset()
    """Tags of the memory that is being taken back."""
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def in_flight(self) -> int:
        return self.decode + self.prefill + self.re_prefill

    @property
    def context_tokens(self) -> int:
        """Tokens of its requests' contexts."""
        return self.tokens + self.beyond

    def count(self, phase: Phase, requests: int) -> None:
        """So many more, or fewer, are in the phase."""
        if phase == "decode":
            self.decode += requests
        elif phase == "prefill":
            self.prefill += requests
        else:
            self.re_prefill += requests


@dataclass(slots=True, kw_only=True, eq=False)
class AttemptNow:
    """An open attempt of a request.

    Attributes:
        context: tokens of its prompt, and those that are known of its response.
        since: when it was sent, was let go on, or had its last chunk, as far as it is watched.
        timed: its chunks tell the rate of its engine.
        watched: its next chunk tells more than the number of its tokens.
    """

    request_id: int
    attempt: int
    rollout_id: int
    engine: EngineNow
    phase: Phase
    context: int
    since: float
    timed: bool
    watched: bool = True


class EngineTime:
    """Adds up each engine's time, and shows what it consists of to `recording`.

    Attributes:
        engines: by name, in the order in which they came; those that are out of use stay.
        attempts: those that are open, by request.
    """

    def __init__(self, recording: Recording | None = None) -> None:
        self.engines: dict[str, EngineNow] = {}
        self.attempts: dict[int, AttemptNow] = {}
        self.now = 0.0
        self._recording = recording
        self._free: Cause = "trainer"
        self._paused: Literal["pause", "trainer"] = "trainer"
        self._outside = 0

    def advance(self, now: float) -> None:
        """End the stretches that go on, and begin new ones."""
        self.now = now
        for engine in self.engines.values():
            self._end_stretch(engine)

    def wait_for(self, free: Cause, paused: Literal["pause", "trainer"], outside: int) -> None:
        """From now on, slots are free and engines are paused for these reasons, and so many
        episodes are with their tools."""
        if (free, paused, outside) != (self._free, self._paused, self._outside):
            self.advance(self.now)
            self._free, self._paused, self._outside = free, paused, outside

    def decoding(self) -> Iterator[int]:
        """The rollouts that grow now, on engines that generate."""
        for attempt in self.attempts.values():
            if attempt.phase == "decode" and attempt.engine.state == "generating":
                yield attempt.rollout_id

    # --- engines -------------------------------------------------------------------------------

    def enlist(self, info: EngineInfo) -> EngineNow:
        """The engine is there, for the first time or again."""
        engine = self.engines.get(info.name)
        if engine is None:
            engine = EngineNow(info=info, version=info.version, since=self.now)
            self.engines[info.name] = engine
        engine.info, engine.version = info, info.version
        return engine

    def enter(self, engine: EngineNow, state: EngineState) -> None:
        """The engine is in this state from now on."""
        if engine.state != state:
            self._end_stretch(engine)
            engine.state = state

    def forget_requests(self) -> None:
        """The process that had sent them has ended."""
        self.advance(self.now)
        self.attempts.clear()
        for engine in self.engines.values():
            engine.state = "lost"
            engine.decode = engine.prefill = engine.re_prefill = engine.timed = 0
            engine.beyond = -engine.tokens

    def go_on(self, engine: EngineNow) -> None:
        """A pause is over."""
        self.enter(engine, "generating")
        for attempt in self.attempts.values():
            if attempt.engine is engine:
                attempt.since = self.now
                if attempt.phase == "decode" and engine.drops_kv:
                    self._change(attempt, "re_prefill")

    # --- attempts ------------------------------------------------------------------------------

    def open(self, attempt: AttemptNow) -> None:
        """It was sent."""
        engine = attempt.engine
        self._end_stretch(engine)
        attempt.timed = engine.timed < _TIMED
        self.attempts[attempt.request_id] = attempt
        engine.count(attempt.phase, 1)
        engine.beyond += attempt.context
        engine.timed += attempt.timed
        engine.peak = max(engine.peak, engine.in_flight)

    def close(self, request_id: int) -> AttemptNow | None:
        """It is open no more."""
        attempt = self.attempts.pop(request_id, None)
        if attempt is not None:
            engine = attempt.engine
            self._end_stretch(engine)
            engine.count(attempt.phase, -1)
            engine.beyond -= attempt.context
            engine.timed -= attempt.timed
        return attempt

    def watch(self, attempt: AttemptNow, tokens: int, now: float) -> None:
        """A chunk has come that ends a wait, or tells the engine's rate."""
        engine = attempt.engine
        took, attempt.since = now - attempt.since, now
        if attempt.phase != "decode":
            self.now = now
            self._first_chunk(attempt, attempt.phase, tokens, took)
        elif tokens:
            rate = took / tokens
            weight = _RATE_WEIGHT if engine.seconds_per_token else 1.0
            engine.seconds_per_token += (rate - engine.seconds_per_token) * weight

    def _first_chunk(
        self,
        attempt: AttemptNow,
        part: Literal["prefill", "re_prefill"],
        tokens: int,
        took: float,
    ) -> None:
        """Some of the time since it was sent or let go on was decoding."""
        engine = attempt.engine
        self._change(attempt, "decode")
        # Where responses come in one piece the rate is never known: one token's time is prefill.
        rate = engine.seconds_per_token
        known = tokens * rate if rate else took * (1 - 1 / max(1, tokens))
        decoding = min(took, known)
        if not decoding:
            return
        seconds, wrong = engine.seconds, PART_INDEX[part]
        moved = min(seconds[wrong], decoding / max(1, engine.peak))
        seconds[wrong] -= moved
        seconds[PART_INDEX["decode"]] += moved
        if self._recording is not None:
            self._recording.moved(
                Moved(engine=engine.name, time=self.now, part=part, slot_seconds=decoding)
            )

    def _change(self, attempt: AttemptNow, phase: Phase) -> None:
        self._end_stretch(attempt.engine)
        attempt.engine.count(attempt.phase, -1)
        attempt.engine.count(phase, 1)
        attempt.phase = phase
        attempt.watched = phase != "decode" or attempt.timed

    # --- time ----------------------------------------------------------------------------------

    def _end_stretch(self, engine: EngineNow) -> None:
        """What follows is another stretch."""
        begin, end = engine.since, self.now
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
