"""An engine and where its time has gone so far, as data for whoever shows or exports it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aprilsched.core.messages.events import EngineInfo
from aprilsched.telemetry.usage.engine_time import EngineNow
from aprilsched.telemetry.usage.parts import BUSY, PARTS, EngineState, Part

__all__ = ["EngineUsage", "engine_usage", "seconds_of", "utilization_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUsage:
    """An engine now, and its time so far.

    Attributes:
        in_flight: requests that it has; the three next are those of them that decode, wait for
            their first token, and wait for their next one after a pause or a move (if it
            generates; in a pause, what they will go on with).
        tokens: that it generated.
        losses: how often it went out of use.
        capacity: the slots that its time is divided by: requests that it had at once at most.
        context_tokens: of its requests: a prompt that the members of a group share counts for each
            of them, and a context counts while its engine is paused without its KV. It is what
            they need, the most that they hold.
        info: what it said of itself when it came.
        seconds: its wall time by part, see :data:`~aprilsched.telemetry.usage.parts.PARTS`.
    """

    name: str
    state: EngineState
    in_flight: int
    version: int | None
    tokens: int
    capacity: int
    decoding: int = 0
    prefilling: int = 0
    re_prefilling: int = 0
    context_tokens: int = 0
    losses: int = 0
    info: EngineInfo | None = None
    seconds: Mapping[Part, float] = field(default_factory=dict[Part, float])

    @property
    def busy(self) -> float:
        """Seconds."""
        return sum(self.seconds[part] for part in BUSY)

    @property
    def wall(self) -> float:
        """Seconds since it is there."""
        return sum(self.seconds.values())


def engine_usage(engine: EngineNow) -> EngineUsage:
    """The engine as it is now."""
    return EngineUsage(
        name=engine.name,
        state=engine.state,
        in_flight=engine.in_flight,
        version=engine.version,
        tokens=engine.tokens,
        capacity=engine.peak,
        decoding=engine.decode,
        prefilling=engine.prefill,
        re_prefilling=engine.re_prefill,
        context_tokens=engine.context_tokens,
        losses=engine.losses,
        info=engine.info,
        seconds=dict(zip(PARTS, engine.seconds, strict=True)),
    )


def seconds_of(engines: Iterable[EngineNow]) -> dict[Part, float]:
    """The parts of these engines' time together."""
    sums = [sum(column) for column in zip(*(engine.seconds for engine in engines), strict=True)]
    return dict(zip(PARTS, sums or [0.0] * len(PARTS), strict=True))


def utilization_of(seconds: Mapping[Part, float]) -> float:
    """The busy share of this time, 0 to 1."""
    wall = sum(seconds.values())
    return sum(seconds[part] for part in BUSY) / wall if wall else 0.0
