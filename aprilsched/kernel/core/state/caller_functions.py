"""How long the caller's functions take: rewards, filters and episodes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from aprilsched.kernel.core.state.durations import Durations

_LAST_CALLS = 256
"""Number of calls of the caller's functions that count."""
_PRIOR_GROUPS = 8.0
"""Number of groups, accepted as all of them, with which the share of a half of them begins."""
_LEAST_ACCEPTED = 0.05
"""The least share that is planned for, because a trial takes as much longer as the share is
smaller."""


def _calls() -> Durations:
    return Durations(begun=True, last=deque(maxlen=_LAST_CALLS))


@dataclass(slots=True)
class CallerTimes:
    """How long the caller's rewards and tools take, and what its accept function says. Steps:
    ``turns``, ``replan``. A resumed run measures them again."""

    rewards: Durations = field(default_factory=_calls)
    """For each group, the time from the end of its last response until it was accepted or
    refused."""
    verdicts: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=_LAST_CALLS))
    """The tokens of each group that the accept function was asked about, and what it said."""
    gaps: Durations = field(default_factory=_calls)
    """The times between the turns of episodes."""
    ends: Durations = field(default_factory=_calls)
    """The times from the last turn of an episode until it returned."""
    turns: deque[int] = field(default_factory=lambda: deque(maxlen=_LAST_CALLS))
    """Numbers of turns of episodes that have returned."""

    @property
    def reward_seconds(self) -> tuple[float, ...]:
        """The times of rewards, from the shortest to the longest; empty where all are 0."""
        parts = self.rewards.parts
        return parts if any(parts) else ()

    @property
    def accepted(self) -> tuple[float, float, float]:
        """The median of the tokens of a group, the share that is accepted of the groups up to it,
        and that of the longer ones."""
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
        """The mean number of gaps between the turns of a response."""
        return float(np.mean(self.turns)) - 1 if self.turns else 0.0
