"""How long the trainer trains, and how long new weights take, measured from the run's own events.

The first duration in a process is left out, because it has the compilation of the trainer and
the setting up of connections in it. Of the others the last ones count, without those that are
far above the median, such as a batch after which the trainer wrote a checkpoint.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_LAST = 8
"""Number of durations that count."""
_FAR = 3.0
"""A duration above this many times the median of those that count is left out."""


@dataclass(slots=True)
class Durations:
    """The last durations of something, in seconds."""

    begun: bool = False
    """Whether the first one, which is left out, was seen."""
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))

    def add(self, seconds: float) -> None:
        """Note the next duration."""
        if self.begun:
            self.last.append(seconds)
        self.begun = True

    @property
    def mean(self) -> float | None:
        """The mean of those that count; None while there is none."""
        return float(self._usual().mean()) if self.last else None

    @property
    def spread(self) -> float:
        """The standard deviation of those that count; 0 while there are fewer than two."""
        return float(self._usual().std()) if self.last else 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """The means of up to 32 equal parts of all of them, from the shortest to the longest. They
        have the mean of all, and the tail."""
        if not self.last:
            return ()
        ordered = np.sort(np.array(self.last, dtype=np.float64))
        return tuple(float(part.mean()) for part in np.array_split(ordered, min(32, len(ordered))))

    def _usual(self) -> NDArray[np.float64]:
        last = np.array(self.last, dtype=np.float64)
        return last[last <= _FAR * np.median(last)]


@dataclass(slots=True)
class TrainerTimes:
    """The trainer's times. It trains while it has a batch, or groups of one, and none of its calls
    is open: it waits for no batch, no group, no update and no evaluation. Steps: ``replan``,
    ``refit``, ``batch``."""

    training: Durations = field(default_factory=Durations)
    """For each batch, the time for which the trainer trained on it."""
    early: Durations = field(default_factory=Durations)
    """For each batch, how much of that time was before the trainer had its last group."""
    steps: Durations = field(default_factory=Durations)
    """The times from the end of one training to the end of the next."""
    refits: Durations = field(default_factory=Durations)
    """For each update, the time for which weights were loaded; with rolling refits, for each engine
    that took one."""
    trained: float | None = None
    """For how long the trainer has trained on the batch that it took last, or takes group by group,
    up to `since`; None if it has asked for another batch since then."""
    trained_early: float = 0.0
    """How much of that time was before it had the last of the groups that it has."""
    since: float | None = None
    """Since when it trains without a pause; None while it does not."""
    ended: float | None = None
    """When it last ended its training on a batch."""

    @property
    def early_share(self) -> float:
        """The share of the trainer's time for a batch that is before it has the batch's last group;
        0 while none is known."""
        training, early = self.training.mean, self.early.mean
        return min(1.0, early / training) if training and early else 0.0

    def take(self) -> None:
        """Note that the trainer, which has waited for it, has taken a batch or a group of one."""
        self.trained = self.trained_early = self.trained or 0.0

    def follow(self, *, trains: bool, now: float) -> None:
        """Note whether the trainer trains from `now` on."""
        if self.trained is not None and self.since is not None:
            self.trained += now - self.since
        self.since = now if trains else None

    def end(self, now: float) -> None:
        """Note that the trainer has ended its training on a batch, as it asks for the next one."""
        if self.trained is None:
            return
        self.training.add(self.trained)
        self.early.add(self.trained_early)
        if self.ended is not None:
            self.steps.add(now - self.ended)
        self.trained, self.trained_early, self.ended = None, 0.0, now
