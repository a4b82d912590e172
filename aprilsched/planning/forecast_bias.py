"""Learns from a run how far forecasts are off, and corrects later ones.

Trials leave out what they do not know: what pauses cost, engines that are not equal. Such things
make a run slower than its forecast by a factor that lasts. It is estimated from the batches of
the run: the work that was done in them over the work that was forecast for the time that they
took. An error of the step-time model is no part of it where the model is fitted to the run, since
the work is counted by the model of the moment.

Lengths are no part of it either. A forecast that was made with other lengths than those of its
batches is off by what they make of the schedule, and the next choice knows them already. So each
choice tries the schedule in force with the lengths of now, and its batches are compared with
that. Where lengths became four times as long under refits of 2 s, engines as modelled were taken
for 37 to 59 % faster than they are.

The more the batches scatter, the more of them it takes to leave 1. One factor for all schedules
cannot change a choice, unless a trainer hides slow engines. Factors for single refill rules only
did so on much evidence, and are gone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_LASTING = 0.05
"""Standard deviation of what lasts, before anything is known. With a step-time model that is fitted
to the run, forecasts of the speed on an H200 were off by this much (experiments/h200)."""
_SCATTER = 0.2
"""Standard deviation of what single batches tell, which counts like one batch's. Length buckets on
an H200 have it. Engines that are slow in every batch are known after a few: with the weight of
eight batches that went as forecast, whatever the scatter, two of four engines at half of the speed
were never taken account of beside a trainer of 20 s, and steps took 25 s."""
_MEMORY, _MOST_TOLD = 32.0, 256
"""Number of batches after which a batch counts for 1/e, and after which it is forgotten."""
_LATEST = 0.5
"""Number of times the expected time of a batch, or of a usual one if that is longer, by which it
counts as late at most. An engine that hung for a minute says nothing about other batches. Where two
waves end together, every second batch is all but complete at its start, and takes the seconds of a
refit for next to no work. By its own length it hung, and forecasts of equal responses became up to
9 % too good."""


@dataclass(slots=True)
class _Sums:
    """Sums over batches: of their work and time, and of time * (work / time)**2."""

    work: float = 0.0
    time: float = 0.0
    squares: float = 0.0

    def add(self, work: float, time: float) -> None:
        kept = 1 - 1 / _MEMORY
        self.work = kept * self.work + work
        self.time = kept * self.time + time
        self.squares = kept * self.squares + work**2 / time

    def factor(self) -> float:
        """Work over time, with a prior of batches that went as they were forecast."""
        prior = self.weight_of_prior()
        return (self.work + prior) / (self.time + prior)

    def weight_of_prior(self) -> float:
        """Number of batches that went as they were forecast with which the factor begins: the
        variance of single batches over that of what lasts (empirical Bayes)."""
        around = self.squares - self.work**2 / self.time if self.time else 0.0
        return (_SCATTER**2 + max(around, 0.0)) / (1 + self.time) / _LASTING**2


class Bias:
    """A factor by which forecasts of efficiency are multiplied."""

    def __init__(self) -> None:
        self._told: deque[tuple[float, float]] = deque(maxlen=_MOST_TOLD)
        """Work and time of each batch."""
        self._since = 0
        """Number of batches since the last choice."""

    def observe(self, *, work: float, time: float) -> None:
        """Add a batch.

        Args:
            work: work done in the batch, over the work that was forecast for a batch.
            time: seconds of the batch, over the seconds that were forecast, without a correction.
        """
        if work >= 0 and time > 0:
            self._told.append((work, time))
            self._since += 1

    def explain(self, work: float, time: float, *, batches: int) -> None:
        """Rescale the batches since the last choice to a new forecast of their schedule, which uses
        newer length estimates: `work` and `time` of a batch over those of the former forecast. The
        new one covers the last `batches`."""
        told, since = list(self._told), min(self._since, batches)
        first = len(told) - since
        told[first:] = [(each / work, took / time) for each, took in told[first:]]
        self._told, self._since = deque(told, maxlen=_MOST_TOLD), 0

    def factor(self) -> float:
        """The factor; 1 if nothing is known."""
        sums = _Sums()
        for work, time in self._told:
            expected = work / sums.factor()
            sums.add(work, min(time, expected + _LATEST * max(expected, 1.0)))
        return sums.factor()
