"""How long the caller's functions take: rewards, filters and episodes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from aprilsched.kernel.core.state.durations import Durations

_LAST_CALLS = 256
"""Number of calls over which the times and verdicts are taken."""
_PRIOR_GROUPS = 8.0
"""Prior weight, in groups: the acceptance rate of each half of the groups is shrunk towards the
overall rate."""
_LEAST_ACCEPTED = 0.05
"""Lower bound of a planned acceptance rate, because a trial takes time in proportion to its
inverse."""


def _calls() -> Durations:
    return Durations(has_first=True, last=deque(maxlen=_LAST_CALLS))


@dataclass(slots=True)
class CallerTimes:
    """Durations of the caller's rewards and tools, and the verdicts of its accept function.

    Steps: ``turns``, ``replan``. A resumed run measures them again.
    """

    rewards: Durations = field(default_factory=_calls)
    """For each group, the time from its last response until it was accepted or rejected."""
    verdicts: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=_LAST_CALLS))
    """Tokens of each group passed to the accept function, and whether it was accepted."""
    gaps: Durations = field(default_factory=_calls)
    """Times between two turns of an episode."""
    ends: Durations = field(default_factory=_calls)
    """Times from the last turn of an episode until it returned."""
    turns: deque[int] = field(default_factory=lambda: deque(maxlen=_LAST_CALLS))
    """Number of turns of each finished episode."""

    @property
    def reward_seconds(self) -> tuple[float, ...]:
        """Reward times in ascending order; empty if all are 0."""
        parts = self.rewards.parts
        return parts if any(parts) else ()

    @property
    def accepted(self) -> tuple[float, float, float]:
        """Median tokens of a group, and the acceptance rates of the groups up to it and above."""
        if all(accepted for _, accepted in self.verdicts):
            return 0.0, 1.0, 1.0
        tokens, accepted = np.array(self.verdicts, dtype=np.float64).T
        median, mean = float(np.median(tokens)), float(accepted.mean())
        halves = (accepted[tokens <= median], accepted[tokens > median])
        short, long = (
            max(_LEAST_ACCEPTED, (half.sum() + _PRIOR_GROUPS * mean) / (len(half) + _PRIOR_GROUPS))
            for half in halves
        )
        return median, float(short), float(long)

    @property
    def gaps_of_response(self) -> float:
        """Mean number of gaps between the turns of a response."""
        return float(np.mean(self.turns)) - 1 if self.turns else 0.0
