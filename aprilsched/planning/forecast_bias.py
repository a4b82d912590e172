"""Estimates the lasting bias of forecasts from a run, and corrects later forecasts.

Trials do not model some effects, such as the cost of pauses and unequal engines. These make a run
slower than its forecast by a lasting factor. It is estimated from the batches of the run: the work
that was done in them, over the work that was forecast for the time that they took. It does not
include errors of a step-time model that is fitted to the run, because the current model measures
the work.

The factor does not include changes of lengths either. If the lengths of the batches differ from the
lengths in the forecast, the forecast is off, but the next choice already knows the new lengths. So
each choice also tries the schedule in force with the current lengths, and its batches are compared
with that forecast. Without this, when lengths grew to four times under refits of 2 s, engines that
matched the model were taken for 37 to 59 % faster than they are.

The more the batches scatter, the more of them it takes for the factor to leave 1. One factor for
all schedules cannot change a choice, unless a trainer hides slow engines. Factors for single refill
rules changed a choice only after much evidence, and were removed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_LASTING = 0.05
"""Prior standard deviation of the lasting factor. With a step-time model that is fitted to the run,
forecasts of the speed on an H200 were off by this much (experiments/h200)."""
_SCATTER = 0.2
"""Prior standard deviation of single batches, with the weight of one batch. Length buckets on an
H200 scatter this much. So engines that are slow in every batch are detected after a few batches.
With a fixed prior of eight batches as forecast, two of four engines at half speed were never
detected next to a trainer of 20 s, and steps took 25 s."""
_MEMORY, _MOST_TOLD = 32.0, 256
"""Number of batches after which a batch counts for 1/e, and after which it is forgotten."""
_LATEST = 0.5
"""Largest lateness that counts for a batch, as a multiple of its expected time or, if longer, of a
usual batch's. A batch in which an engine hung for a minute does not predict other batches. When two
waves end together, every second batch is almost complete at its start, and takes the seconds of a
refit for next to no work. Measured by its own expected time it would count as hung, which made
forecasts of equal responses up to 9 % too good."""


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
        """Return work over time, with a prior of batches that went as forecast."""
        prior = self.weight_of_prior()
        return (self.work + prior) / (self.time + prior)

    def weight_of_prior(self) -> float:
        """Return the prior's weight, as a number of batches that went as forecast.

        It is the variance of single batches over the variance of the lasting factor (empirical
        Bayes).
        """
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
        """Rescale the batches since the last choice to a new forecast of their schedule.

        The new forecast uses newer length estimates and covers the last `batches`. `work` and
        `time` are ratios, new over former, of a batch's forecast work and time.
        """
        pairs, since = list(self._told), min(self._since, batches)
        first = len(pairs) - since
        pairs[first:] = [(each / work, took / time) for each, took in pairs[first:]]
        self._told, self._since = deque(pairs, maxlen=_MOST_TOLD), 0

    def factor(self) -> float:
        """Return the factor; 1 if nothing is known."""
        sums = _Sums()
        for work, time in self._told:
            expected = work / sums.factor()
            sums.add(work, min(time, expected + _LATEST * max(expected, 1.0)))
        return sums.factor()
