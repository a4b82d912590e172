"""Computes how a recorded run's engines spent their time, from its events.jsonl.

Invariant: the parts of each engine add up to the time since it opened or joined.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aprilsched.observe.figures.engine_time import (
    BUSY,
    PART_INDEX,
    PARTS,
    Moved,
    Part,
    Stretch,
    seconds_by_part,
)
from aprilsched.observe.figures.run_state import RunState
from aprilsched.observe.log.basis import batch_units_of
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.run import readable
from aprilsched.observe.log.run_folder import EVENTS, config_in


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunUsage:
    """The engines' time in a run, in seconds. Parts are in the order of
    :data:`~aprilsched.observe.figures.engine_time.PARTS`.

    Attributes:
        engines: names of the engines in the order of joining.
        capacity: number of slots of each engine, by which its time is divided.
        tokens: number of tokens that each engine generated.
        wall: seconds of the run.
        edges: for each engine, float64 [n], times between which nothing changed.
        spent: for each engine, float64 [n, parts], seconds of each part up to each edge.
    """

    engines: tuple[str, ...]
    capacity: tuple[int, ...]
    tokens: tuple[int, ...]
    wall: float
    edges: tuple[NDArray[np.float64], ...]
    spent: tuple[NDArray[np.float64], ...]

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds by engine and part, float64 [engines, parts]."""
        return np.array([spent[-1] for spent in self.spent]).reshape(len(self.engines), len(PARTS))

    @property
    def shares(self) -> dict[Part, float]:
        """Shares of all engines' time together; they add up to 1."""
        sums = self.seconds.sum(axis=0)
        total = float(sums.sum()) or 1.0
        return {part: float(sums[index]) / total for part, index in PART_INDEX.items()}

    @property
    def utilization(self) -> float:
        """Busy share of all engines' time, 0 to 1."""
        return busy_share(self.seconds)

    def series(
        self, bins: int, *, start: float = 0.0, end: float | None = None
    ) -> NDArray[np.float64]:
        """Return the seconds of each part in each of `bins` equal intervals from `start` to `end`
        (by default the whole run), float64 [bins, engines, parts]."""
        stops = np.linspace(start, self.wall if end is None else end, bins + 1)
        result = np.zeros((bins, len(self.engines), len(PARTS)))
        for engine, (edges, spent) in enumerate(zip(self.edges, self.spent, strict=True)):
            for part in range(len(PARTS)):
                result[:, engine, part] = np.diff(np.interp(stops, edges, spent[:, part]))
        return result


def busy_share(seconds: NDArray[np.float64]) -> float:
    """Return the busy share of the seconds float64 [..., parts], 0 to 1; 0 without any."""
    total = float(seconds.sum())
    busy = seconds[..., [PART_INDEX[part] for part in BUSY]].sum()
    return float(busy) / total if total else 0.0


def usage_of(folder: Path) -> RunUsage:
    """Compute the usage of the run in `folder`.

    Raises:
        RunFolderError: if a file is missing or cannot be understood.
    """
    with readable(folder):
        config = config_in(folder)
        recorder = UsageRecorder(batch_units=batch_units_of(config))
        end = replay(folder / EVENTS, [recorder])
    return recorder.usage(end)


class UsageRecorder:
    """A listener that keeps every stretch, because the capacity of an engine may be known only at
    the end."""

    def __init__(self, *, batch_units: int | None = None) -> None:
        self._stretches: dict[str, list[Stretch]] = {}
        self._moved: dict[str, list[Moved]] = {}
        self._state = RunState(batch_units=batch_units, recording=self)
        self.on_facts = self._state.on_facts

    def usage(self, end: float) -> RunUsage:
        """Return the usage up to `end`."""
        self._state.advance(end)
        engines = self._state.engines
        columns = [self._spent(name, engine.capacity) for name, engine in engines.items()]
        return RunUsage(
            engines=tuple(engines),
            capacity=tuple(engine.capacity for engine in engines.values()),
            tokens=tuple(engine.tokens for engine in engines.values()),
            wall=end,
            edges=tuple(edges for edges, _ in columns),
            spent=tuple(spent for _, spent in columns),
        )

    def stretch(self, stretch: Stretch) -> None:
        """Keep a stretch that has ended."""
        self._stretches.setdefault(stretch.engine, []).append(stretch)

    def moved(self, moved: Moved) -> None:
        """Keep a correction of earlier stretches."""
        self._moved.setdefault(moved.engine, []).append(moved)

    def _spent(self, name: str, capacity: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        stretches = self._stretches.get(name, [])
        if not stretches:
            return np.zeros(1), np.zeros((1, len(PARTS)))
        edges = np.array([stretches[0].start, *(stretch.end for stretch in stretches)])
        seconds = np.array([seconds_by_part(stretch, capacity) for stretch in stretches])
        slots = np.array([max(1, capacity, s.decode + s.prefill + s.re_prefill) for s in stretches])
        self._correct(seconds, edges, name, slots)
        spent = np.vstack([np.zeros(len(PARTS)), np.cumsum(seconds, axis=0)])
        return edges, spent

    def _correct(
        self,
        seconds: NDArray[np.float64],
        edges: NDArray[np.float64],
        name: str,
        slots: NDArray[np.int64],
    ) -> None:
        """Move the time of a correction from earlier stretches to decoding, from the one slot of
        its request."""
        for part in ("prefill", "re_prefill"):
            moved = [moved for moved in self._moved.get(name, []) if moved.part == part]
            ends = np.array([one.time for one in moved])
            starts = ends - np.array([one.slot_seconds for one in moved])
            slot_seconds = np.diff(_since(starts, edges) - _since(ends, edges))
            taken = np.clip(slot_seconds / slots, 0.0, seconds[:, PART_INDEX[part]])
            seconds[:, PART_INDEX[part]] -= taken
            seconds[:, PART_INDEX["decode"]] += taken


def _since(times: NDArray[np.float64], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum over `times` of the seconds since each, at each of `at`."""
    ordered = np.sort(times)
    past = np.searchsorted(ordered, at, side="right")
    return past * at - np.concatenate(([0.0], np.cumsum(ordered)))[past]
