"""The product-limit estimate of the length law, with unfinished responses as censored ones.

Kaplan and Meier, 1958: at each length t where d responses end and n had at least t tokens,
S(t) = prod (1 - d / n). A response in flight with t tokens says that its length is above t, so
it counts among the n up to t. That is unbiased as long as what stopped the observation (the end
of the run, an eviction by age) depends on the length only through the tokens so far; to look at
finished responses alone is not.

The tail, Efron's rule: where the longest observation is an unfinished one, nothing is known
beyond it, and the mass that is left is taken to end with its next token. So means are lower
bounds by at most `tail` times what is missing there; `tail` says how much mass that concerns.
:meth:`KaplanMeier.completed` guesses what is there instead.

Invariant: `survival` falls strictly from below 1, is constant between two entries of `lengths`,
and is taken as 0 from `end` on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aprilsched.kernel.core.lengths.log_law import normal_quantile

_LEAST_AT_RISK = 10
"""Number of responses from which the share of those that end somewhere is estimated."""
_PARTS = (1.5, 2.0, 4.0, math.inf)
"""Parts of a law from which its tail is guessed: the lengths whose survival is at most so many
times that of the last length before the tail."""
_LEAST_IN_PART = 20
"""Number of different lengths in a part from which anything is guessed."""
_LEAST_SLOPE = 0.6
"""The tail is at most that of a log normal law with a deviation of 1 / 0.6. With 1 / 0.3 the guess
after one batch was twice as far off where lengths are uniform or exponential."""
_FARTHEST = 8
"""A tail ends at this many times the longest length that any response has had, finished or not.
Where only half of the responses of the first batch have ended, this halves the error of a guess for
uniform and exponential lengths, whose mean squares were guessed nine times too large."""
_TAIL_STEPS = 64
"""Number of equally likely lengths that a guessed tail has."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KaplanMeier:
    """A length law. Lengths are in tokens. Arrays have m entries, one for each length at which a
    response was seen to end, or is guessed to, in ascending order.

    Attributes:
        lengths: int64 [m].
        survival: float64 [m], P(L > lengths).
        at_risk: int64 [m], number of responses that were observed at `lengths`, those that ended
            there included.
        observations: number of responses that were used, unfinished ones included.
        tail: the mass beyond the longest finished response; 0 if no response was unfinished there.
        end: length from which on the survival is taken as 0.
        longest: int64 [10], the largest of all lengths and tokens so far, ascending; fewer if there
            are not so many.
    """

    lengths: NDArray[np.int64]
    survival: NDArray[np.float64]
    at_risk: NDArray[np.int64]
    observations: int
    tail: float
    end: int
    longest: NDArray[np.int64]
    _table: list[NDArray[Any]] = field(default_factory=list["NDArray[Any]"], init=False, repr=False)
    """The steps of the survival and its integral from each of them, once they are needed: a law
    is asked about thousands of responses."""

    def survival_at(self, at: ArrayLike) -> NDArray[np.float64]:
        """P(L > at), in the shape of `at`."""
        times, steps = self._steps()
        return steps[np.searchsorted(times, np.asarray(at), side="right") - 1]

    def quantile(self, q: ArrayLike) -> NDArray[np.int64]:
        """The shortest length t with P(L <= t) >= q, in the shape of `q` (0 to 1)."""
        return self.residual_quantile(q, 0)

    def residual_quantile(self, q: ArrayLike, at: ArrayLike) -> NDArray[np.int64]:
        """The quantile of the law of L given L > at; with uniform `q` the results are draws from
        this law.

        Beyond `end` the result is the next token. `q` and `at` are broadcast.
        """
        times, steps = self._steps()
        left = (1 - np.asarray(q, dtype=np.float64)) * self.survival_at(at)
        # A product of many factors differs from a round number by some units in the last place.
        index = np.searchsorted(-steps, -left - 1e-12, side="left")
        found = times[np.minimum(index, len(times) - 1)]
        return np.maximum(found, np.asarray(at, dtype=np.int64) + 1)

    def mean(self) -> float:
        """E[L], with Efron's rule for the tail."""
        return float(self._integral(np.array([0]))[0])

    def residual_mean(self, at: ArrayLike) -> NDArray[np.float64]:
        """E[L - at | L > at], in the shape of `at`; 1 from `end` on (the next token)."""
        start = np.asarray(at, dtype=np.float64)
        alive = self.survival_at(start)
        return np.divide(
            self._integral(start), alive, out=np.ones_like(start, dtype=np.float64), where=alive > 0
        )

    def completed(self, most: int) -> KaplanMeier:
        """The law with a guess of its tail; the law itself where too few lengths are known for one.

        In the first batches of a run the longest responses still run. Nobody has been seen to end
        there, or one or two of the few that began early enough, and under Efron's rule all would
        end then. Of a log normal law with sigma = 1.1 whose longest tenth is unseen, the mean is
        20 % too small then, and the mean of the squares, which is what reading the KV costs, 67 %.

        The tail begins where fewer than 10 responses are at risk and less than half of those that
        would be if all had ended; ends beyond that are left out. It is that of a log normal law
        with the same mass beyond this length. Its deviation is the smallest one of those that least
        squares of the normal quantiles over the logs find in several last parts of the estimate.
        The smallest one is taken because a gap before the last part, as of two modes, would make
        any tail longer. The guessed lengths have nobody at risk, and the variance of the last one
        that is known.

        Args:
            most: the most tokens that a response can have.
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
        # Responses that still run are at risk up to their tokens so far. With a tail from the last
        # end on, forty that were far beyond it were taken for as good as ended.
        begin = max(int(lengths[-1]), int(self.longest[-math.ceil(least[known])]))
        left = tail * (1 - (np.arange(_TAIL_STEPS) + 0.5) / _TAIL_STEPS)
        beyond = normal_quantile(np.array([tail])) - normal_quantile(left)
        logs = math.log(begin) + beyond / max(*slopes, _LEAST_SLOPE)
        most = max(min(most, _FARTHEST * int(self.longest[-1])), begin + 1)
        drawn = np.exp(np.minimum(logs, math.log(most)))
        more, counts = np.unique(
            np.maximum(np.rint(drawn).astype(np.int64), begin + 1), return_counts=True
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
        """Kolmogorov's distance of a sample from this law: the largest difference of the two
        distribution functions, 0 to 1.

        Args:
            lengths: int64 [n], at least one, of responses that have ended.
        """
        at = np.concatenate((self._steps()[0], lengths))
        share = np.searchsorted(np.sort(lengths), at, side="right") / len(lengths)
        return float(np.abs(share - (1 - self.survival_at(at))).max())

    def _steps(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The survival as a step function that begins with 1 at 0 and ends with 0 at `end`."""
        if not self._table:
            last = [] if self.tail == 0 else [self.end]
            times = np.concatenate(([0], self.lengths, last)).astype(np.int64)
            steps = np.concatenate(([1.0], self.survival, [0.0] * len(last)))
            area = np.append(np.cumsum((np.diff(times) * steps[:-1])[::-1])[::-1], 0.0)
            self._table.extend((times, steps, area))
        return self._table[0], self._table[1]

    def _integral(self, start: NDArray[np.float64]) -> NDArray[np.float64]:
        """The integral of the survival from each of `start` to `end`."""
        times, steps = self._steps()
        index = np.searchsorted(times, start, side="right") - 1
        return self._table[2][index] - steps[index] * (start - times[index])


def kaplan_meier(lengths: ArrayLike, censored: ArrayLike) -> KaplanMeier:
    """The estimate from `lengths` int64 [n], of which `censored` bool [n] are tokens so far.

    Raises:
        ValueError: if there is no observation, shapes differ, a finished length is below 1 or
            tokens so far are negative.
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
