"""The product-limit estimate of the length distribution; unfinished responses are censored.

Kaplan and Meier, 1958: at each length t where d responses end and n had at least t tokens, S(t) =
prod (1 - d / n). A response in flight with t tokens has a length above t, so it counts among the n
up to t. The estimate is unbiased as long as the cause of censoring (the end of the run, an eviction
by age) depends on the length only through the tokens so far. An estimate from finished responses
alone is biased.

The tail, Efron's rule: if the longest observation is unfinished, nothing is known beyond it, and
the remaining mass is assumed to end with its next token. So means are lower bounds, too small by at
most `tail` times the mean excess beyond that length; `tail` is the affected mass.
:meth:`KaplanMeier.completed` guesses the tail instead.

Invariant: `survival` falls strictly from below 1, is constant between two entries of `lengths`, and
is taken as 0 from `end` on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aprilsched.kernel.core.lengths.log_lengths import normal_quantile

_LEAST_AT_RISK = 10
"""Number of responses at risk from which a hazard is estimated."""
_PARTS = (1.5, 2.0, 4.0, math.inf)
"""Parts of a distribution from which its tail is guessed: the lengths whose survival is at most
this multiple of the survival at the last length before the tail."""
_LEAST_IN_PART = 20
"""Number of different lengths that a part needs for a guess."""
_LEAST_SLOPE = 0.6
"""The tail is at most that of a log-normal distribution with a deviation of 1 / 0.6. With 1 / 0.3
the guess after one batch has twice the error for uniform or exponential lengths."""
_FARTHEST = 8
"""A tail ends at this multiple of the longest length that any response has had, finished or not. If
only half of the responses of the first batch have ended, this halves the error of a guess for
uniform and exponential lengths, whose mean squares are otherwise guessed nine times too large."""
_TAIL_STEPS = 64
"""Number of equally likely lengths in a guessed tail."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KaplanMeier:
    """A length distribution. Lengths are in tokens. Arrays have m entries in ascending order, one
    for each length at which a response was observed to end, or is guessed to end.

    Attributes:
        lengths: int64 [m].
        survival: float64 [m], P(L > lengths).
        at_risk: int64 [m], number of responses that were observed at `lengths`, those that ended
            there included.
        observations: number of responses that were used, unfinished ones included.
        tail: the mass beyond the longest finished response; 0 if no response was unfinished there.
        end: length from which on the survival is taken as 0.
        longest: int64 [10], the largest of all lengths and tokens so far, ascending; fewer entries
            if there are fewer responses.
    """

    lengths: NDArray[np.int64]
    survival: NDArray[np.float64]
    at_risk: NDArray[np.int64]
    observations: int
    tail: float
    end: int
    longest: NDArray[np.int64]
    _table: list[NDArray[Any]] = field(default_factory=list["NDArray[Any]"], init=False, repr=False)
    """The steps of the survival and its integral from each of them, computed on first use: a
    distribution is evaluated for thousands of responses."""

    def survival_at(self, at: ArrayLike) -> NDArray[np.float64]:
        """Return P(L > at), in the shape of `at`."""
        times, steps = self._steps()
        return steps[np.searchsorted(times, np.asarray(at), side="right") - 1]

    def quantile(self, q: ArrayLike) -> NDArray[np.int64]:
        """Return the shortest length t with P(L <= t) >= q, in the shape of `q` (0 to 1)."""
        return self.residual_quantile(q, 0)

    def residual_quantile(self, q: ArrayLike, at: ArrayLike) -> NDArray[np.int64]:
        """Return the quantile of the distribution of L given L > at.

        With uniform `q` the results are draws from this distribution. Beyond `end` the result is
        the next token. `q` and `at` are broadcast.
        """
        times, steps = self._steps()
        left = (1 - np.asarray(q, dtype=np.float64)) * self.survival_at(at)
        # A product of many factors differs from a round number by some units in the last place.
        index = np.searchsorted(-steps, -left - 1e-12, side="left")
        found = times[np.minimum(index, len(times) - 1)]
        return np.maximum(found, np.asarray(at, dtype=np.int64) + 1)

    def mean(self) -> float:
        """Return E[L], with Efron's rule for the tail."""
        return float(self._integral(np.array([0]))[0])

    def residual_mean(self, at: ArrayLike) -> NDArray[np.float64]:
        """Return E[L - at | L > at], in the shape of `at`; 1 from `end` on (the next token)."""
        start = np.asarray(at, dtype=np.float64)
        alive = self.survival_at(start)
        return np.divide(
            self._integral(start), alive, out=np.ones_like(start, dtype=np.float64), where=alive > 0
        )

    def completed(self, most: int) -> KaplanMeier:
        """Return the distribution with a guessed tail, or itself if too few lengths are known.

        In the first batches of a run the longest responses still run. No response, or only one or
        two of the few that started early enough, has ended at such lengths, and Efron's rule would
        let all of them end there. For a log-normal distribution with sigma = 1.1 whose longest
        tenth is unseen, the mean is then 20 % too small, and the mean of the squares, which
        determines the cost of reading the KV, 67 %.

        The tail starts where fewer than 10 responses are at risk and less than half of those that
        would be if all had ended; ends beyond that are left out. The tail is that of a log normal
        distribution with the same mass beyond this length. Candidates for its deviation are
        least-squares fits of the normal quantiles to the logs, in several last parts of the
        estimate. The smallest candidate is used, because a gap before the last part, as of two
        modes, would make any tail longer. The guessed lengths have 0 at risk, and the variance of
        the last known one.

        Args:
            most: the largest possible number of tokens of a response.
        """
        before = np.concatenate(([1.0], self.survival))
        least = np.minimum(_LEAST_AT_RISK, before * self.observations / 2)
        few = np.flatnonzero(np.append(self.at_risk, 0) < least)
        known = int(few[0]) if len(few) else len(self.lengths)
        lengths, survival, tail = self.lengths[:known], self.survival[:known], float(before[known])
        slopes = [
            float(np.polyfit(np.log(lengths[part]), -normal_quantile(survival[part]), 1)[0])
            for part in (survival <= factor * tail for factor in _PARTS)
            if int(part.sum()) >= _LEAST_IN_PART
        ]
        if tail == 0 or not slopes:
            return self
        # Running responses are at risk up to their tokens so far. If the tail started at the last
        # end, running responses far beyond it (forty in one case) would count as almost finished.
        tail_start = max(int(lengths[-1]), int(self.longest[-math.ceil(least[known])]))
        left = tail * (1 - (np.arange(_TAIL_STEPS) + 0.5) / _TAIL_STEPS)
        beyond = normal_quantile(np.array([tail])) - normal_quantile(left)
        logs = math.log(tail_start) + beyond / max(*slopes, _LEAST_SLOPE)
        most = max(min(most, _FARTHEST * int(self.longest[-1])), tail_start + 1)
        drawn = np.exp(np.minimum(logs, math.log(most)))
        more, counts = np.unique(
            np.maximum(np.rint(drawn).astype(np.int64), tail_start + 1), return_counts=True
        )
        return replace(
            self,
            lengths=np.concatenate((lengths, more)),
            survival=np.append(survival, tail * (1 - np.cumsum(counts) / _TAIL_STEPS)),
            at_risk=np.append(self.at_risk[:known], np.zeros(len(more), dtype=np.int64)),
            tail=0.0,
            end=int(more[-1]),
        )

    def distance(self, lengths: NDArray[np.int64]) -> float:
        """Return Kolmogorov's distance of a sample from this distribution, 0 to 1.

        It is the largest difference of the two distribution functions.

        Args:
            lengths: int64 [n], at least one, of responses that have ended.
        """
        at = np.concatenate((self._steps()[0], lengths))
        share = np.searchsorted(np.sort(lengths), at, side="right") / len(lengths)
        return float(np.abs(share - (1 - self.survival_at(at))).max())

    def _steps(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the survival as a step function from 1 at 0 to 0 at `end`."""
        if not self._table:
            last = [] if self.tail == 0 else [self.end]
            times = np.concatenate(([0], self.lengths, last)).astype(np.int64)
            steps = np.concatenate(([1.0], self.survival, [0.0] * len(last)))
            area = np.append(np.cumsum((np.diff(times) * steps[:-1])[::-1])[::-1], 0.0)
            self._table.extend((times, steps, area))
        return self._table[0], self._table[1]

    def _integral(self, start: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the integral of the survival from each of `start` to `end`."""
        times, steps = self._steps()
        index = np.searchsorted(times, start, side="right") - 1
        return self._table[2][index] - steps[index] * (start - times[index])


def kaplan_meier(lengths: ArrayLike, censored: ArrayLike) -> KaplanMeier:
    """Return the estimate from `lengths` int64 [n]; those `censored`, bool [n], are unfinished.

    Raises:
        ValueError: if `lengths` is empty, shapes differ, a finished length is below 1 or tokens so
            far are negative.
    """
    seen = np.asarray(lengths, dtype=np.int64)
    open_ = np.asarray(censored, dtype=np.bool_)
    _check(seen, open_)
    times, ends = np.unique(seen[~open_], return_counts=True)
    ordered = np.sort(seen)
    at_risk = len(seen) - np.searchsorted(ordered, times, side="left")
    alive = at_risk > ends
    survival = np.where(alive, np.cumprod(1 - ends / at_risk), 0.0).astype(np.float64)
    tail = float(survival[-1]) if len(times) else 1.0
    return KaplanMeier(
        lengths=times,
        survival=survival,
        at_risk=at_risk,
        observations=len(seen),
        tail=tail,
        end=int(seen.max()) + 1 if tail > 0 else int(times[-1]),
        longest=ordered[-_LEAST_AT_RISK:],
    )


def _check(seen: NDArray[np.int64], censored: NDArray[np.bool_]) -> None:
    if seen.ndim != 1 or seen.shape != censored.shape or seen.size == 0:
        raise ValueError(
            f"lengths have shape {seen.shape} and censored {censored.shape}; give one flag for "
            "each length, and at least one."
        )
    if seen.min() < 0 or (~censored & (seen < 1)).any():
        raise ValueError("a length is below 1; give finished lengths from 1 and tokens from 0.")
