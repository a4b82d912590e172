"""The parts of an engine's wall time, and how a stretch of time is divided among them.

Invariant: the parts of a stretch add up to its length.

An engine's number of slots is its `capacity`: the number of requests that it runs at once, or the
largest number that it has had if it does not report this limit. So two runs on the same engines can
be compared. While the engine generates, each slot counts separately: if two of eight slots decode
for a second, a quarter of that second is "decode", and the rest goes to the part that explains why
the other slots were free. While the engine does not generate, all slots belong to one part.

A slot is not a share of the GPU's compute. A decode step costs less than in proportion to its
batch size, so an engine that is half empty loses less than half of its speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.messages.events import EngineInfo
from aprilsched.kernel.shell.listener import DispatchingListener

Part: TypeAlias = Literal[
    "decode",
    "prefill",
    "re_prefill",
    "tail",
    "pause",
    "refit",
    "trainer",
    "prompts",
    "rewards",
    "environment",
    "asleep",
    "lost",
]
EngineState: TypeAlias = Literal["generating", "paused", "refitting", "asleep", "lost"]
Cause: TypeAlias = Literal["tail", "trainer", "prompts", "rewards"]
"""Why the fleet starts nothing new, and why slots are therefore free."""

PARTS: dict[Part, str] = {
    "decode": "The slots decode tokens of responses.",
    "prefill": "A response waits for its first token: it is in the engine's queue, or its prompt "
    "is prefilled.",
    "re_prefill": "A response waits for its next token after a pause or a move to another engine: "
    "the KV of its tokens is recomputed.",
    "tail": "Slots are free because all responses that the batch may start are started, and the "
    "last ones have not ended.",
    "pause": "The engine is paused around an update, and is not loading weights.",
    "refit": "The engine loads new weights.",
    "trainer": "A batch is ready and the trainer has not asked for it, or the trainer still trains "
    "on the one before.",
    "prompts": "There are no prompts: the source is slow, or has ended.",
    "rewards": "The responses of the batch are complete, and their rewards are not.",
    "environment": "Episodes use their tools, or wait for an agent or their score, and have no "
    "request for the engine.",
    "asleep": "The engine sleeps: its memory is released for the trainer.",
    "lost": "The engine is lost or on standby.",
}
"""Each part with its meaning, in the order in which they are shown: the useful parts come first."""

PART_LABELS: dict[Part, str] = {
    "decode": "generating",
    "prefill": "queued or reading prompts",
    "re_prefill": "recomputing contexts",
    "tail": "waiting for the last responses",
    "pause": "paused",
    "refit": "new weights",
    "trainer": "waiting for the trainer",
    "prompts": "waiting for prompts",
    "rewards": "waiting for rewards",
    "environment": "tools and scores of episodes",
    "asleep": "asleep",
    "lost": "out of use",
}
"""A self-explanatory label for each part."""

PART_INDEX: dict[Part, int] = {part: index for index, part in enumerate(PARTS)}
BUSY: tuple[Part, ...] = ("decode",)
"""The parts in which an engine surely does work that no schedule could avoid. "prefill" is none of
them, because engines do not report how long a request waited in their queue before its prefill."""

_ENVIRONMENT = PART_INDEX["environment"]
_STATE_INDEX: dict[EngineState, int] = {
    "refitting": PART_INDEX["refit"],
    "asleep": PART_INDEX["asleep"],
    "lost": PART_INDEX["lost"],
}


class Stretch(NamedTuple):
    """A time in which nothing changed for `engine`. Times are in seconds.

    It is a named tuple because a log contains hundreds of thousands of stretches, and a frozen
    dataclass takes several times as long to create.

    Attributes:
        idle: why slots are free, or why the engine is paused.
        decode, prefill, re_prefill: number of requests in each phase.
        environment: number of free slots that belong to episodes in a tool call.
    """

    engine: str
    start: float
    end: float
    state: EngineState
    idle: Cause | Literal["pause"]
    decode: int
    prefill: int
    re_prefill: int
    environment: float


def seconds_by_part(stretch: Stretch, capacity: int) -> list[float]:
    """Return the seconds of a stretch, in the order of :data:`PARTS`.

    Args:
        capacity: number of slots of the engine. If the stretch has more requests than that, each
            request counts as a slot.
    """
    seconds = [0.0] * len(PARTS)
    counts = (stretch.decode, stretch.prefill, stretch.re_prefill)
    add_seconds(
        seconds,
        stretch.end - stretch.start,
        stretch.state,
        stretch.idle,
        counts,
        stretch.environment,
        capacity,
    )
    return seconds


def add_seconds(
    seconds: list[float],
    length: float,
    state: EngineState,
    idle: Cause | Literal["pause"],
    counts: tuple[int, int, int],
    environment: float,
    capacity: int,
) -> None:
    """Add the seconds of a stretch to `seconds`, in place.

    Takes plain numbers instead of a :class:`Stretch`, because it runs at every start and end of a
    request.
    """
    if state != "generating":
        seconds[_STATE_INDEX.get(state, PART_INDEX[idle])] += length
        return
    decode, prefill, re_prefill = counts
    in_flight = decode + prefill + re_prefill
    slots = max(1, capacity, in_flight)
    each = length / slots
    seconds[0] += each * decode
    seconds[1] += each * prefill
    seconds[2] += each * re_prefill
    free = slots - in_flight
    if free:
        elsewhere = min(float(free), environment)
        seconds[_ENVIRONMENT] += each * elsewhere
        seconds[PART_INDEX[idle]] += each * (free - elsewhere)


# The time of an engine is divided into stretches: times in which nothing changes. Invariants: the
# stretches of an engine follow each other without a gap, from its opening or joining to the last
# call of :meth:`EngineTime.advance`. Each stretch is divided by the engine's capacity at that time.
#
# A request whose KV was dropped in a pause shows no progress until its next chunk, which may arrive
# many decode steps later. That time first counts as re-prefill. When the chunk arrives, its decode
# seconds are moved to decoding: those that the engine reports, or else the time that its tokens
# take at the engine's measured rate.

Phase: TypeAlias = Literal["decode", "prefill", "re_prefill"]

_RATE_WEIGHT = 0.1
"""Weight of a new chunk in the running mean of an engine's rate, which covers dozens of chunks."""
_TIMED = 8
"""Number of requests of an engine whose chunks are timed to measure its rate. The requests of an
engine all decode at one rate, and timing the chunks of hundreds of them would be most of the cost
of this module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """Slot-seconds of `engine` before `time` that were counted as `part`, but were decoding."""

    engine: str
    time: float
    part: Literal["prefill", "re_prefill"]
    slot_seconds: float


class Recording(Protocol):
    """Receives each stretch, for readers that need more than the sums."""

    def stretch(self, stretch: Stretch) -> None:
        """Receive a finished stretch."""
        ...

    def moved(self, moved: Moved) -> None:
        """Receive a correction: a part of earlier stretches was decoding."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class EngineUsage:
    """The current state of an engine, and its time so far by part.

    Attributes:
        info: the engine's description when it opened or joined.
        version: policy version of its weights; None if they are inconsistent.
        since: start time of the current stretch.
        decode: number of requests that decode.
        prefill: number of requests that wait for their first token.
        re_prefill: number of requests that wait for their next token after a pause or a move.
        capacity: number of slots among which the time is divided: the requests that it runs at
            once, or the largest number so far if it does not report this limit.
        tokens: number of tokens generated so far.
        losses: how often the engine was lost.
        beyond: number of tokens in the contexts of its requests, minus `tokens`. A chunk adds the
            same amount to both numbers, so this difference stays valid without an update.
        seconds_per_token: running mean of the time per token of one request; 0 until a timed
            request has sent two chunks.
        timed: number of requests whose chunks are timed for that mean.
        drops_kv: whether the current or latest pause drops the KV of its requests.
        released: tags of the memory released to the trainer.
        waking: tags of the memory being resumed.
        seconds: time so far, in the order of PARTS.
    """

    info: EngineInfo
    version: int | None
    since: float = 0.0
    state: EngineState = "generating"
    decode: int = 0
    prefill: int = 0
    re_prefill: int = 0
    capacity: int = 0
    tokens: int = 0
    losses: int = 0
    beyond: int = 0
    seconds_per_token: float = 0.0
    timed: int = 0
    drops_kv: bool = True
    released: frozenset[str] = frozenset()
    waking: frozenset[str] = frozenset()
    seconds: list[float] = field(default_factory=lambda: [0.0] * len(PARTS))

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def in_flight(self) -> int:
        return self.decode + self.prefill + self.re_prefill

    @property
    def context_tokens(self) -> int:
        """Number of tokens in the contexts of its requests, an upper bound of the KV in use. A
        shared prompt of a group counts once per member, and a context also counts while a pause has
        dropped its KV."""
        return self.tokens + self.beyond

    @property
    def parts(self) -> dict[Part, float]:
        """Its seconds so far by part, see :data:`PARTS`."""
        return dict(zip(PARTS, self.seconds, strict=True))

    @property
    def busy(self) -> float:
        """Its busy seconds."""
        return sum(self.seconds[PART_INDEX[part]] for part in BUSY)

    @property
    def wall(self) -> float:
        """Seconds since it joined."""
        return sum(self.seconds)

    def count(self, phase: Phase, requests: int) -> None:
        """Add `requests`, which may be negative, to the number of requests in the phase."""
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
        context: number of tokens of its prompt and of its response so far.
        since: time at which it was sent, was continued after a pause, or sent its last watched
            chunk.
        timed: whether its chunks are timed to measure the rate of its engine.
        watched: whether the time of its next chunk is needed, and not only its number of tokens.
    """

    request_id: int
    attempt: int
    rollout_id: int
    engine: EngineUsage
    phase: Phase
    context: int
    since: float
    timed: bool
    watched: bool = True


class EngineTime(DispatchingListener):
    """Adds up the time of each engine, from the facts about engines and requests.

    Args:
        recording: receives each stretch of each engine.

    Attributes:
        engines: the engines by name, in the order of joining, including lost engines.
        attempts: the open attempts, by the id of their request.
    """

    def __init__(self, recording: Recording | None = None) -> None:
        super().__init__()
        self.engines: dict[str, EngineUsage] = {}
        self.attempts: dict[int, AttemptNow] = {}
        self._attempts_on: dict[str, dict[int, AttemptNow]] = {}
        self._in_use = 0
        """Number of engines that are not lost."""
        self._recording = recording
        self._free: Cause = "trainer"
        self._paused: Literal["pause", "trainer"] = "trainer"
        self._outside = 0
        self._handlers = {
            of.RunOpened: self._run_opened,
            of.AttemptSent: self._attempt_sent,
            of.AttemptEnded: lambda fact: self._close(fact.request_id),
            of.EngineJoined: self._engine_joined,
            of.EngineAdmitted: self._engine_admitted,
            of.EngineLost: self._engine_lost,
            of.EngineModeChanged: self._engine_mode_changed,
            of.EngineRefitted: self._engine_refitted,
        }

    def advance(self, now: float) -> None:
        """End the current stretch of each engine at `now`, and start a new one."""
        self._now = now
        for engine in self.engines.values():
            self._end_stretch(engine)

    def wait_for(self, free: Cause, paused: Literal["pause", "trainer"], outside: int) -> None:
        """Set the reasons for free slots and for pauses, from now on.

        Args:
            free: why slots of generating engines are free.
            paused: why engines are paused.
            outside: number of episodes that use their tools.
        """
        if (free, paused, outside) != (self._free, self._paused, self._outside):
            self.advance(self._now)
            self._free, self._paused, self._outside = free, paused, outside

    def decoding(self) -> Iterator[int]:
        """Ids of the rollouts whose response is being decoded now."""
        for attempt in self.attempts.values():
            if attempt.phase == "decode" and attempt.engine.state == "generating":
                yield attempt.rollout_id

    def _run_opened(self, fact: of.RunOpened) -> None:
        """Forget all requests, because the process that sent them has ended."""
        self.advance(self._now)
        self.attempts.clear()
        self._attempts_on.clear()
        self._in_use = 0
        for engine in self.engines.values():
            engine.state = "lost"
            engine.decode = engine.prefill = engine.re_prefill = engine.timed = 0
            engine.beyond = -engine.tokens
        for info in fact.engines:
            self._enter(self._enlist(info), "lost" if info.name in fact.standby else "generating")

    def _enlist(self, info: EngineInfo) -> EngineUsage:
        """Add an engine that opens or joins, for the first time or again."""
        engine = self.engines.get(info.name)
        if engine is None:
            engine = EngineUsage(info=info, version=info.version, since=self._now)
            self.engines[info.name] = engine
            self._in_use += 1
        engine.info, engine.version = info, info.version
        if info.able.max_running_requests is not None:
            engine.capacity = info.able.max_running_requests
        return engine

    def _enter(self, engine: EngineUsage, state: EngineState) -> None:
        """Set the state of an engine from now on."""
        if engine.state != state:
            self._end_stretch(engine)
            self._in_use += (state != "lost") - (engine.state != "lost")
            engine.state = state

    def _engine_joined(self, fact: of.EngineJoined) -> None:
        """Count an engine that joins as lost until it is admitted."""
        self._enter(self._enlist(fact.info), "lost")

    def _engine_admitted(self, fact: of.EngineAdmitted) -> None:
        if (engine := self.engines.get(fact.engine)) is not None:
            engine.version = fact.version
            self._enter(engine, "generating")

    def _engine_lost(self, fact: of.EngineLost) -> None:
        if (engine := self.engines.get(fact.engine)) is not None:
            engine.losses += 1
            engine.released = frozenset()
            self._enter(engine, "lost")

    def _engine_refitted(self, fact: of.EngineRefitted) -> None:
        if (engine := self.engines.get(fact.engine)) is not None:
            engine.version = fact.version

    def _engine_mode_changed(self, fact: of.EngineModeChanged) -> None:
        """Enter the state that follows from a change of mode; a lost engine stays lost until it is
        admitted."""
        engine = self.engines.get(fact.engine)
        if engine is None:
            return
        lost = engine.state == "lost"
        match fact.finish:
            case "pausing":
                engine.drops_kv = fact.pause == "retract"
                if not lost:
                    self._enter(engine, "paused")
            case "flushing":
                engine.drops_kv = True
            case "refitting" if engine.state == "paused":
                self._enter(engine, "refitting")
            case "releasing":
                engine.drops_kv = True
                engine.released |= set(fact.tags)
                if not lost:
                    self._enter(engine, "asleep")
            case "waking":
                engine.waking = frozenset(fact.tags)
            case "paused":
                if fact.start == "waking":
                    engine.released -= engine.waking
                if not lost and not engine.released:
                    self._enter(engine, "paused")
            case "running" if fact.start == "continuing" and not lost:
                self._continue(engine)
            case _:
                pass

    def _continue(self, engine: EngineUsage) -> None:
        """Continue an engine after a pause."""
        self._enter(engine, "generating")
        for attempt in self._attempts_on.get(engine.name, {}).values():
            attempt.since = self._now
            if attempt.phase == "decode" and engine.drops_kv:
                self._change(attempt, "re_prefill")

    def _attempt_sent(self, fact: of.AttemptSent) -> None:
        engine = self.engines.get(fact.engine)
        if engine is None:
            return
        self._close(fact.request_id)
        self._end_stretch(engine)
        attempt = AttemptNow(
            request_id=fact.request_id,
            attempt=fact.attempt,
            rollout_id=fact.rollout_id,
            engine=engine,
            phase="re_prefill" if fact.attempt > 1 else "prefill",
            context=fact.tokens,
            since=self._now,
            timed=engine.timed < _TIMED,
        )
        self.attempts[attempt.request_id] = attempt
        self._attempts_on.setdefault(engine.name, {})[attempt.request_id] = attempt
        engine.count(attempt.phase, 1)
        engine.beyond += attempt.context
        engine.timed += attempt.timed
        if engine.info.able.max_running_requests is None:
            engine.capacity = max(engine.capacity, engine.in_flight)

    def _close(self, request_id: int) -> None:
        """Remove the attempt of a request that has ended, if there was one."""
        attempt = self.attempts.pop(request_id, None)
        if attempt is not None:
            engine = attempt.engine
            del self._attempts_on[engine.name][request_id]
            self._end_stretch(engine)
            engine.count(attempt.phase, -1)
            engine.beyond -= attempt.context
            engine.timed -= attempt.timed

    def watch(self, attempt: AttemptNow, fact: of.TokensReceived, now: float) -> None:
        """Record the time of a chunk that ends a wait or updates the engine's rate."""
        engine, tokens = attempt.engine, fact.tokens
        took, attempt.since = now - attempt.since, now
        if attempt.phase != "decode":
            self._now = now
            self._first_chunk(attempt, attempt.phase, fact, took)
        elif tokens:
            rate = took / tokens
            weight = _RATE_WEIGHT if engine.seconds_per_token else 1.0
            engine.seconds_per_token += (rate - engine.seconds_per_token) * weight

    def _first_chunk(
        self,
        attempt: AttemptNow,
        part: Literal["prefill", "re_prefill"],
        fact: of.TokensReceived,
        took: float,
    ) -> None:
        """Move the part of the wait in which the chunk's tokens were decoded to decoding."""
        engine = attempt.engine
        self._change(attempt, "decode")
        # If each response arrives in one chunk, the rate remains unknown. Then the wait is divided
        # evenly among the tokens, and the share of one token counts as prefill.
        rate = engine.seconds_per_token
        known = fact.decode_seconds
        if known is None:
            known = fact.tokens * rate if rate else took * (1 - 1 / max(1, fact.tokens))
        decoding = min(took, known)
        if not decoding:
            return
        seconds, wrong = engine.seconds, PART_INDEX[part]
        moved = min(seconds[wrong], decoding / max(1, engine.capacity, engine.in_flight))
        seconds[wrong] -= moved
        seconds[PART_INDEX["decode"]] += moved
        if self._recording is not None:
            self._recording.moved(
                Moved(engine=engine.name, time=self._now, part=part, slot_seconds=decoding)
            )

    def _change(self, attempt: AttemptNow, phase: Phase) -> None:
        self._end_stretch(attempt.engine)
        attempt.engine.count(attempt.phase, -1)
        attempt.engine.count(phase, 1)
        attempt.phase = phase
        attempt.watched = phase != "decode" or attempt.timed

    def _end_stretch(self, engine: EngineUsage) -> None:
        """End the current stretch of an engine, count it, and start the next one."""
        low, end = engine.since, self._now
        if end <= low:
            return
        engine.since = end
        state = engine.state
        idle = self._free if state == "generating" else self._paused
        counts = (engine.decode, engine.prefill, engine.re_prefill)
        environment = self._outside / max(1, self._in_use) if self._outside else 0.0
        add_seconds(engine.seconds, end - low, state, idle, counts, environment, engine.capacity)
        if self._recording is not None:
            self._recording.stretch(
                Stretch(engine.name, low, end, state, idle, *counts, environment)
            )
