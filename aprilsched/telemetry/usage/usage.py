"""Where the engines' time has gone so far; a listener, for whoever shows or exports it live."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from aprilsched.core.messages.events import EngineInfo
from aprilsched.telemetry.usage.occupancy import Occupancy
from aprilsched.telemetry.usage.parts import BUSY, PARTS, EngineState, Part

__all__ = ["EngineUsage", "Usage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUsage:
    """An engine now, and its time so far.

    Attributes:
        in_flight: requests that it has; the three next are those of them that decode, wait for
            their first token, and wait for their next one after a pause or a move (if it
            generates; in a pause, what they will go on with).
        tokens: that it generated.
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


class Usage:
    """Adds the parts up for each engine of a run, while it goes on.

    A stretch is divided by the capacity that the engine had shown until then. `batch_groups` is
    that of the scheduler; None is learnt from the first batch.
    """

    def __init__(self, *, batch_groups: int | None = None) -> None:
        self._occupancy = Occupancy(batch_groups=batch_groups)
        self.on_event = self._occupancy.on_event
        self.on_progress = self._occupancy.on_progress
        self.on_command = self._occupancy.on_command

    def advance(self, now: float) -> None:
        """Count the time up to `now`, the clock's of the events."""
        self._occupancy.advance(now)

    @property
    def engines(self) -> dict[str, EngineUsage]:
        """By name, in the order in which they came."""
        return {
            name: EngineUsage(
                name=name,
                state=engine.state,
                in_flight=engine.in_flight,
                version=engine.version,
                tokens=engine.tokens,
                capacity=engine.peak,
                decoding=engine.decode,
                prefilling=engine.prefill,
                re_prefilling=engine.re_prefill,
                context_tokens=engine.context_tokens,
                info=engine.info,
                seconds=dict(zip(PARTS, engine.seconds, strict=True)),
            )
            for name, engine in self._occupancy.engines.items()
        }

    @property
    def groups_ready(self) -> int:
        """Groups that are complete, and wait for their batch."""
        return self._occupancy.groups_ready

    @property
    def outside(self) -> int:
        """Episodes that are with their tools."""
        return self._occupancy.outside

    def decoding(self) -> Iterator[int]:
        """The rollouts that grow now, on engines that generate."""
        return self._occupancy.decoding()

    def seconds(self) -> dict[Part, float]:
        """The parts of all engines together."""
        engines = self._occupancy.engines.values()
        sums = [sum(column) for column in zip(*(e.seconds for e in engines), strict=True)]
        return dict(zip(PARTS, sums or [0.0] * len(PARTS), strict=True))

    def utilization(self) -> float:
        """The busy share of the time so far, 0 to 1."""
        seconds = self.seconds()
        wall = sum(seconds.values())
        return sum(seconds[part] for part in BUSY) / wall if wall else 0.0
