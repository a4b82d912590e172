"""The parts of an engine's wall time, and how a stretch of time is divided among them.

Invariant: the parts of a stretch add up to its length.

An engine has as many slots as the largest number of requests that it had at once (its `capacity`).
While the engine generates, each slot is counted by itself: if two of eight slots decode for a
second, this is a quarter of a second of "decode", and the other three quarters have another part,
which says why the slots were free. While the engine does not generate, all its slots have the same
part. A slot is not a share of the GPU's arithmetic: a step of decoding costs less than in
proportion to the batch, so an engine that is half empty loses less than half of its speed.
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
    "environment": "Episodes use their tools, and have no request for the engine.",
    "asleep": "The engine sleeps: its memory is released for the trainer.",
    "lost": "The engine is lost or on standby.",
}
"""Each part with its meaning, in the order in which they are shown: the useful parts come first."""

PART_INDEX: dict[Part, int] = {part: index for index, part in enumerate(PARTS)}
BUSY: tuple[Part, ...] = ("decode", "prefill")
"""The parts in which an engine does work that no schedule could avoid."""

_ENVIRONMENT = PART_INDEX["environment"]
_STATE_INDEX: dict[EngineState, int] = {
    "refitting": PART_INDEX["refit"],
    "asleep": PART_INDEX["asleep"],
    "lost": PART_INDEX["lost"],
}


class Stretch(NamedTuple):
    """A time in which nothing changed for `engine`. Times are in seconds.

    It is a named tuple because a log has hundreds of thousands of stretches, and a frozen dataclass
    takes several times as long to make.

    Attributes:
        idle: why the free slots are free, or why the engine is paused.
        decode, prefill, re_prefill: number of requests in each phase.
        environment: number of the free slots that belong to episodes that use their tools.
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
    """The seconds of a stretch, in the order of :data:`PARTS`.

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

    It takes plain numbers and not a :class:`Stretch`, because it is called whenever a request
    begins or ends.
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
