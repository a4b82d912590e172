"""Keeps what the engines did in each few seconds of the last minutes.

Invariant: its memory does not grow with the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.telemetry.usage.engine_usage import EngineUsage

__all__ = ["COLUMN_SECONDS", "History"]

COLUMN_SECONDS = 5.0
"""Seconds between two samples, which is one column of the sparkline."""
_COLUMNS = 60
_RATE_SECONDS = 60.0
"""Seconds over which an engine's speed is averaged. This is longer than most batches, so that the
speed does not jump at every pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    """Sums since the run began, by engine."""

    time: float
    busy: dict[str, float]
    wall: dict[str, float]
    tokens: dict[str, int]


class History:
    """Is given the state of the engines whenever the time is `due` or later."""

    def __init__(self) -> None:
        self.due = 0.0
        """Time of the next sample."""
        self._samples: deque[_Sample] = deque(maxlen=_COLUMNS + 1)
        self._columns: tuple[float, ...] | None = None
        """Columns computed from the present samples. A frame is drawn several times between two
        samples."""

    def add(self, now: float, engines: Mapping[str, EngineUsage]) -> None:
        """Take a sample. The engines' seconds must be counted up to `now`."""
        self.due = now + COLUMN_SECONDS
        self._samples.append(_sample(now, engines))
        self._columns = None

    def utilization(self) -> tuple[float, ...]:
        """Busy share of all engines' time in each column up to the last sample, 0 to 1."""
        if self._columns is None:
            self._columns = self._compute()
        return self._columns

    def _compute(self) -> tuple[float, ...]:
        times: NDArray[np.float64] = np.array([sample.time for sample in self._samples])
        if len(times) < 2:
            return ()
        columns = min(_COLUMNS, max(1, round((times[-1] - times[0]) / COLUMN_SECONDS)))
        # If nothing happened for some time, one sample covers several columns.
        stops: NDArray[np.float64] = times[-1] - COLUMN_SECONDS * np.arange(columns, -1, -1)
        busy: NDArray[np.float64] = np.interp(
            stops, times, [sum(s.busy.values()) for s in self._samples]
        )
        wall: NDArray[np.float64] = np.interp(
            stops, times, [sum(s.wall.values()) for s in self._samples]
        )
        spent: NDArray[np.float64] = np.diff(wall)
        shares = np.divide(np.diff(busy), spent, out=np.zeros(columns), where=spent > 0)
        return tuple(np.clip(shares, 0.0, 1.0).tolist())

    def lately(self, engine: EngineUsage, now: float) -> tuple[float, float]:
        """The engine's busy share and its tokens a second in the last minute."""
        before = self._before(now)
        busy = engine.busy - before.busy.get(engine.name, 0.0)
        wall = engine.wall - before.wall.get(engine.name, 0.0)
        tokens = engine.tokens - before.tokens.get(engine.name, 0)
        if wall <= 0:
            return 0.0, 0.0
        return min(1.0, max(0.0, busy / wall)), tokens / wall

    def _before(self, now: float) -> _Sample:
        for sample in self._samples:
            if now - sample.time <= _RATE_SECONDS:
                if now > sample.time:
                    return sample
                break
        return self._samples[-2] if len(self._samples) > 1 else _sample(0.0, {})


def _sample(now: float, engines: Mapping[str, EngineUsage]) -> _Sample:
    return _Sample(
        time=now,
        busy={name: engine.busy for name, engine in engines.items()},
        wall={name: engine.wall for name, engine in engines.items()},
        tokens={name: engine.tokens for name, engine in engines.items()},
    )
