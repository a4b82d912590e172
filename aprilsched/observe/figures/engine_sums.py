"""Sums of engine time over a run or a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aprilsched.observe.figures.engine_time import BUSY, PARTS, EngineUsage, Part


def seconds_of(engines: Iterable[EngineUsage]) -> dict[Part, float]:
    """Return the seconds of all these engines by part."""
    sums = [sum(column) for column in zip(*(engine.seconds for engine in engines), strict=True)]
    return dict(zip(PARTS, sums or [0.0] * len(PARTS), strict=True))


def utilization_of(seconds: Mapping[Part, float]) -> float:
    """Return the busy share of this time, 0 to 1."""
    wall = sum(seconds.values())
    return sum(seconds[part] for part in BUSY) / wall if wall else 0.0
