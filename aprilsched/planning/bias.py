"""Learns from a run how far forecasts are off, and corrects later ones.

Trials leave out what they do not know: what pauses cost, engines that are not equal, rewards that
are late. Such things make a run slower than its forecast by a factor that lasts. It is estimated
from the batches of the run: the work that was done in them over the work that was forecast for the
time that they took. An error of the step-time model is no part of it where the model is fitted to
the run, since the work is counted by the model of the moment.

The estimate is one factor for all schedules, and one for each refill rule that begins at it. The
more the batches scatter, the more of them it takes to leave 1. A factor for all cannot change a
choice, unless a trainer hides slow engines, and those of the rules only do so on much evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Bias"]

_LASTING = 0.05
"""Standard deviation of what lasts, before anything is known. With a step-time model that is fitted
to the run, forecasts of the speed on an H200 were off by this much (experiments/h200)."""
_SCATTER = 0.2
"""Standard deviation of what single batches tell, which counts like one batch's. Length buckets on
an H200 have it. Engines that are slow in every batch are known after a few: with the weight of
eight batches that went as forecast, whatever the scatter, two of four engines at half of the speed
were never taken account of beside a trainer of 20 s, and steps took 25 s."""
_PRIOR_OF_A_RULE = 16.0
"""Number of batches, that went as the factor for all says, with which a rule's factor begins. With
8 or 32, forecasts in experiments/forecasts are no better."""
_MEMORY = 32.0
"""Number of batches after which a batch counts for 1/e."""
_CLIP = 1.5
"""A batch that took longer or shorter than expected by more than this factor counts as one that
did so by this factor. An engine that hung for a minute says nothing about other batches."""


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

    def weight_of_prior(self) -> float:
        """Number of batches that went as they were forecast with which the factor begins: the
        variance of single batches over that of what lasts (empirical Bayes)."""
        around = self.squares - self.work**2 / self.time if self.time else 0.0
        return (_SCATTER**2 + max(around, 0.0)) / (1 + self.time) / _LASTING**2


class Bias:
    """Factors by which forecasts of efficiency are multiplied."""

    def __init__(self) -> None:
        self._all = _Sums()
        self._rules: dict[str, _Sums] = {}

    def observe(self, rule: str, *, work: float, time: float) -> None:
        """Add a batch under a schedule with this refill rule.

        Args:
            work: work done in the batch, over the work that was forecast for a batch.
            time: seconds of the batch, over the seconds that were forecast, without a correction.
        """
        if not (work > 0 and time > 0):
            return
        expected = work / self.factor(rule)
        time = min(max(time, expected / _CLIP), expected * _CLIP)
        self._all.add(work, time)
        self._rules.setdefault(rule, _Sums()).add(work, time)

    def factor(self, rule: str) -> float:
        """The factor for a schedule with this refill rule; 1 where nothing is known."""
        prior = self._all.weight_of_prior()
        of_all = (self._all.work + prior) / (self._all.time + prior)
        own = self._rules.get(rule)
        if own is None:
            return of_all
        return (own.work + _PRIOR_OF_A_RULE * of_all) / (own.time + _PRIOR_OF_A_RULE)
