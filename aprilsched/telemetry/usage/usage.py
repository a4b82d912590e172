"""Where the engines' time has gone so far; a listener, for whoever shows or exports it live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aprilsched.telemetry.usage.occupancy import Moved, Occupancy
from aprilsched.telemetry.usage.parts import (
    BUSY,
    PART_INDEX,
    PARTS,
    EngineState,
    Part,
    Stretch,
    seconds_by_part,
)

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
        self._seconds: dict[str, list[float]] = {}
        self._occupancy = Occupancy(self._add, self._move, batch_groups=batch_groups)
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
                decoding=engine.counts["decode"],
                prefilling=engine.counts["prefill"],
                re_prefilling=engine.counts["re_prefill"],
                seconds=dict(zip(PARTS, self._of(name), strict=True)),
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

    def decodes(self, request_id: int) -> bool:
        """The request grows now, on an engine that generates."""
        return self._occupancy.decodes(request_id)

    def seconds(self) -> dict[Part, float]:
        """The parts of all engines together."""
        sums = [sum(column) for column in zip(*self._seconds.values(), strict=True)]
        return dict(zip(PARTS, sums or [0.0] * len(PARTS), strict=True))

    def utilization(self) -> float:
        """The busy share of the time so far, 0 to 1."""
        seconds = self.seconds()
        wall = sum(seconds.values())
        return sum(seconds[part] for part in BUSY) / wall if wall else 0.0

    def _of(self, name: str) -> list[float]:
        return self._seconds.setdefault(name, [0.0] * len(PARTS))

    def _add(self, stretch: Stretch) -> None:
        mine = self._of(stretch.engine)
        peak = self._occupancy.engines[stretch.engine].peak
        for index, seconds in enumerate(seconds_by_part(stretch, peak)):
            if seconds:
                mine[index] += seconds

    def _move(self, moved: Moved) -> None:
        mine = self._of(moved.engine)
        wrong = PART_INDEX[moved.part]
        slots = max(1, self._occupancy.engines[moved.engine].peak)
        seconds = min(mine[wrong], moved.slot_seconds / slots)
        mine[wrong] -= seconds
        mine[PART_INDEX["decode"]] += seconds
