"""Durations of training and of refits, measured from the events of the run.

The first duration in a process is left out, because it includes the trainer's compilation and the
setup of connections. Only the latest of the others count. Outliers far above the median, such as a
batch with a checkpoint, are excluded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_LAST = 8
"""Number of durations that count."""
_FAR = 3.0
"""Ratio to the median of the latest durations above which a duration is excluded."""


@dataclass(slots=True)
class Durations:
    """The latest durations of one activity, in seconds."""

    has_first: bool = False
    """Whether the first duration, which is left out, has passed."""
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))

    def add(self, seconds: float) -> None:
        """Add the next duration."""
        if self.has_first:
            self.last.append(seconds)
        self.has_first = True

    @property
    def mean(self) -> float | None:
        """Mean without outliers; None before the first duration."""
        return float(self._usual().mean()) if self.last else None

    @property
    def spread(self) -> float:
        """Standard deviation without outliers; 0 while there are fewer than two durations."""
        return float(self._usual().std()) if self.last else 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """Means of up to 32 equal parts of all durations, in ascending order; empty if none.

        They preserve the overall mean and the tail.
        """
        if not self.last:
            return ()
        ordered = np.sort(np.array(self.last, dtype=np.float64))
        return tuple(float(part.mean()) for part in np.array_split(ordered, min(32, len(ordered))))

    def _usual(self) -> NDArray[np.float64]:
        last = np.array(self.last, dtype=np.float64)
        return last[last <= _FAR * np.median(last)]


@dataclass(slots=True)
class TrainerTimes:
    """The trainer's times. Steps: ``replan``, ``refit``, ``batch``.

    The trainer counts as training while it has a batch, or groups of one, and none of its calls is
    open: neither for a batch or group, nor for an update or evaluation.
    """

    training: Durations = field(default_factory=Durations)
    """Training time of each batch."""
    steps: Durations = field(default_factory=Durations)
    """Times from the end of one batch's training to the end of the next."""
    refits: Durations = field(default_factory=Durations)
    """Loading time of each update; with rolling refits, of each engine that took one."""
    trained: float | None = None
    """Training time, up to `since`, on the batch that the trainer took last or takes group by
    group; None once it has asked for another batch."""
    since: float | None = None
    """Start of the current stretch of training; None while the trainer does not train."""
    ended: float | None = None
    """End of the training on the previous batch; None before the first."""

    def take(self) -> None:
        """Record that the waiting trainer has taken a batch, or a group of one."""
        if self.trained is None:
            self.trained = 0.0

    def follow(self, *, trains: bool, now: float) -> None:
        """Record whether the trainer trains from `now` on."""
        if self.trained is not None and self.since is not None:
            self.trained += now - self.since
        self.since = now if trains else None

    def end(self, now: float) -> None:
        """Record the end of a batch's training, when the trainer requests the next one."""
        if self.trained is None:
            return
        self.training.add(self.trained)
        if self.ended is not None:
            self.steps.add(now - self.ended)
        self.trained, self.ended = None, now
