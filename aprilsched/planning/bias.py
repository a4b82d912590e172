"""Learns from a run how far forecasts are off, and corrects later ones.

Trials leave out what they do not know: what pauses cost, engines that are not equal, rewards that
are late. Such things make a run slower than its forecast by a factor that lasts. It is estimated
from the batches of the run: the work that was done in them over the work that was forecast for the
time that they took. An error of the step-time model is no part of it where the model is fitted to
the run, since the work is counted by the model of the moment.

The estimate is one factor for all schedules, and one for each refill rule that begins at it. A
factor for all cannot change a choice, and those of the rules only do so on much evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Bias"]

_PRIOR = 8.0
"""Number of batches, that went as they were forecast, with which the factor for all begins. Six
batches after the begin of a schedule scatter by several percent, and what they tell is partly what
the schedule before left behind. On an H200 (experiments/h200) the speed of the next twenty was
forecast to 3.8 % with 8 in the mean, to 5.3 % with 1, and to 3.7 % without any correction, but
without one nothing is learned that lasts."""
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
    work: float = 0.0
    time: float = 0.0

    def add(self, work: float, time: float) -> None:
        kept = 1 - 1 / _MEMORY
        self.work = kept * self.work + work
        self.time = kept * self.time + time


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
        of_all = (self._all.work + _PRIOR) / (self._all.time + _PRIOR)
        own = self._rules.get(rule)
        if own is None:
            return of_all
        return (own.work + _PRIOR_OF_A_RULE * of_all) / (own.time + _PRIOR_OF_A_RULE)
