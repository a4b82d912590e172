"""The parts of an engine's wall time, and how a stretch of it is divided among them.

Invariant: the parts of a stretch add up to its length, whatever happened in it.

An engine has as many slots as it had requests at once when it was fullest (its `capacity`). While
it generates, each slot counts for itself: two of eight slots decoding for a second are a quarter of
a second of "decode", and the other three quarters have a cause. While it does not generate, all of
them have the same one. A slot is no share of the GPU's arithmetic: decoding costs less than
proportionally to the batch, so a half-empty engine is slower than a full one by less than half.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

__all__ = [
    "BUSY",
    "PARTS",
    "PART_INDEX",
    "Cause",
    "EngineState",
    "Part",
    "Stretch",
    "add_seconds",
    "seconds_by_part",
]

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
"""Why the fleet starts nothing new, and so why slots are empty."""

PARTS: dict[Part, str] = {
    "decode": "Responses grow.",
    "prefill": "A response waits for its first token: it is in the engine's queue, or its prompt "
    "is read.",
    "re_prefill": "A response waits for its next token after a pause or a move to another engine: "
    "what is known of it is read again.",
    "tail": "Slots are empty because the batch has all the responses it may start, and the last "
    "ones still grow.",
    "pause": "The engine is paused around an update, and no weights come in.",
    "refit": "New weights come in.",
    "trainer": "A batch is ready and the trainer has not asked for it, or is not done with the "
    "one it has.",
    "prompts": "No prompts are there: the source is slow, or has ended.",
    "rewards": "The batch would be full if the rewards of its responses were there.",
    "environment": "Episodes are with their tools, and have nothing for the engine.",
    "asleep": "The engine's memory was lent to the trainer.",
    "lost": "The engine is out of use.",
}
"""Each part with its meaning, in the order in which they are shown: what is useful comes first."""

PART_INDEX: dict[Part, int] = {part: index for index, part in enumerate(PARTS)}
BUSY: tuple[Part, ...] = ("decode", "prefill")
"""The parts in which an engine does what nobody could save."""

_ENVIRONMENT = PART_INDEX["environment"]
_STATE_INDEX: dict[EngineState, int] = {
    "refitting": PART_INDEX["refit"],
    "asleep": PART_INDEX["asleep"],
    "lost": PART_INDEX["lost"],
}


class Stretch(NamedTuple):
    """A time in which nothing changed for `engine`; times in seconds. A tuple, because a log has
    hundreds of thousands, and a frozen dataclass takes several times as long.

    Attributes:
        idle: why its free slots are free, or why it is paused.
        decode, prefill, re_prefill: requests that it has, by what they are at.
        environment: of the free slots, those that episodes will come back to.
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
    """Seconds in the order of :data:`PARTS`, for an engine with `capacity` slots (at least as many
    as it has requests, else those)."""
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
    """Add a stretch's to those of an engine so far, in place: done at each request's beginning and
    end."""
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
