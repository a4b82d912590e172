"""The measurements on one H200: steps of each schedule, and their windows in the server's log.

The steps of the two ground-truth schedules were timed. Those of the other schedules are read from
the log, whose clock has whole seconds: a boundary is the last line before a batch's restart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from schedules import Row, cached_waves, pool, refilled_waves, wait_for_all, waves

from aprilsched.planning.step_times import LogLine
from aprilsched.planning.step_times.model import StepTimeModel

__all__ = ["SCHEDULES", "STRETCHES", "Schedule", "Stretch", "within"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule: how it is simulated, and its measured steps.

    `seconds` and `rates` (generated tokens/s) are of each step; without `seconds` both are read
    from the log of `run` between the `boundaries`.
    """

    name: str
    simulate: Callable[[int, StepTimeModel], list[Row]]
    seconds: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    run: str = ""
    boundaries: tuple[str, ...] = ()

    def measured(self, lines: list[LogLine]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds and generated tokens/s of each step."""
        if self.seconds:
            return self.seconds, self.rates
        spans = list(pairwise(self.boundaries))
        seconds = tuple(_clock(end) - _clock(start) for start, end in spans)
        tokens = [_tokens(lines, self.run, start, end) for start, end in spans]
        return seconds, tuple(n / s for n, s in zip(tokens, seconds, strict=True))


def _clock(time: str) -> float:
    hours, minutes, seconds = map(int, time.split(":"))
    return 3600.0 * hours + 60 * minutes + seconds


def _tokens(lines: list[LogLine], run: str, start: str, end: str) -> float:
    """Decoded by `run` after `start` until `end`: 40 steps of each line's mean batch."""
    pairs = pairwise(lines)
    batches = [
        (old.running + new.running) / 2
        for old, new in pairs
        if new.engine == old.engine == run and start < new.time <= end
    ]
    return float(40 * np.sum(batches))


TIMED_WAVES = ((25.1, 21.9, 22.1, 22.9), (16_958.0, 12_193.0, 12_070.0, 10_789.0))
TIMED_POOL = (
    (37.5, 23.0, 21.2, 19.6, 25.9),
    (15_702.0, 12_758.0, 12_181.0, 11_926.0, 11_453.0),
)

SCHEDULES = (
    Schedule(
        name="waves of 64 groups, abort, carried prefilled again",
        simulate=lambda seed, timing: waves(seed, 4, timing),
        seconds=TIMED_WAVES[0],
        rates=TIMED_WAVES[1],
    ),
    Schedule(
        name="the same, carried out of a prefix cache",
        simulate=lambda seed, timing: cached_waves(seed, 4, timing),
        seconds=TIMED_WAVES[0],
        rates=TIMED_WAVES[1],
    ),
    Schedule(
        name="pool of 320, KV kept",
        simulate=lambda seed, timing: pool(seed, 5, 320, timing),
        seconds=TIMED_POOL[0],
        rates=TIMED_POOL[1],
    ),
    Schedule(
        name="pool of 320, recompute",
        simulate=lambda seed, timing: pool(seed, 4, 320, timing, recompute=True),
        run="run3",
        boundaries=("20:19:44", "20:20:23", "20:20:51", "20:21:19", "20:21:44"),
    ),
    Schedule(
        name="pool of 512, recompute",
        simulate=lambda seed, timing: pool(seed, 3, 512, timing, recompute=True),
        run="run2",
        boundaries=("19:52:20", "19:52:59", "19:53:21", "19:53:52"),
    ),
    Schedule(
        name="waves of 384 requests, recompute",
        simulate=lambda seed, timing: refilled_waves(seed, 4, 384, timing),
        run="run3",
        boundaries=("20:22:04", "20:22:31", "20:22:53", "20:23:15", "20:23:37"),
    ),
    Schedule(
        name="synchronous",
        simulate=lambda seed, timing: wait_for_all(seed, 2, timing),
        run="run2",
        boundaries=("19:55:20", "19:56:00", "19:56:34"),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Windows that are left out of a fit together: those of one schedule."""

    name: str
    run: str
    spans: tuple[tuple[str, str], ...] = field(default=(("00:00:00", "23:59:59"),))


STRETCHES = (
    Stretch(name="fixed batches, 1 to 512", run="run1"),
    Stretch(
        name="waves of 64 groups",
        run="run2",
        spans=(("19:50:40", "19:52:19"), ("19:57:00", "19:57:38")),
    ),
    Stretch(name="pool of 512", run="run2", spans=(("19:52:20", "19:55:13"),)),
    Stretch(name="synchronous, first", run="run2", spans=(("19:55:20", "19:56:00"),)),
    Stretch(name="synchronous, second", run="run2", spans=(("19:56:01", "19:56:36"),)),
    Stretch(name="pool of 320, KV kept", run="run3", spans=(("20:17:34", "20:19:43"),)),
    Stretch(name="pool of 320, recompute", run="run3", spans=(("20:19:44", "20:22:03"),)),
    Stretch(name="waves of 384 requests", run="run3", spans=(("20:22:04", "20:24:04"),)),
)


def within(stretch: Stretch, line: LogLine) -> bool:
    """Whether the line is of the stretch."""
    inside = any(start <= line.time <= end for start, end in stretch.spans)
    return line.engine == stretch.run and inside
