"""The remaining steps of open groups, estimated from the lengths of their members so far.

The expected steps of a group are the median remaining length of its longest member. Log lengths are
normal with mean mu and deviation sigma; a share w of the variance is common to the group. Each
member contributes x: its log length, or, unfinished with h tokens, the mean of the normal
distribution beyond log h (the inverse Mills ratio, at most 1.5 deviations). With k members

    P = 1 / (w sigma^2) + k / ((1 - w) sigma^2),  M = mu + sum(x - mu) / ((1 - w) sigma^2) / P

are the precision and mean of the group's level, and s^2 = (1 - w) sigma^2 + 1 / P is a member's
variance around M. The remaining length of an unfinished member is the quantile of that
distribution, given its h tokens, at which all u unfinished members together end with probability
one half.

If earlier epochs of the same prompt are remembered
(:mod:`aprilsched.kernel.core.lengths.observed`), the mean and variance of the group's level replace
mu and w sigma^2.

The precision of mu, sigma and w hardly matters: an error of a third costs 1 % of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MILLS_MOST = 1.5
_LEAST_DEVIATION = 0.05
_LEAST_SHARED = 0.05
_GRID: NDArray[np.float64] = np.linspace(-8.0, 8.0, 4001)
_NORMAL: NDArray[np.float64] = np.array(
    [0.5 * math.erfc(-z / math.sqrt(2)) for z in _GRID.tolist()], dtype=np.float64
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLengths:
    """The distribution of log lengths: mean, deviation, the share of the variance that the members
    of a group have in common, and the largest possible number of tokens of a response."""

    mean: float = 6.5
    deviation: float = 1.0
    shared: float = 0.5
    cap: float = math.inf

    @staticmethod
    def estimated(*, mean: float, deviation: float, shared: float, cap: float) -> LogLengths:
        """Return a distribution from estimates, limited so that no single observation dominates."""
        return LogLengths(
            mean=mean,
            deviation=max(deviation, _LEAST_DEVIATION),
            shared=min(max(shared, _LEAST_SHARED), 1 - _LEAST_SHARED),
            cap=cap,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Levels:
    """The levels of groups as known before their own tokens.

    A level is the expected log length of a group's responses, and its distribution is normal.

    Attributes:
        mean: float64 [G, 1].
        variance: float64 [G, 1]; ``shared * deviation**2``, as in the distribution, if nothing is
            known.
    """

    mean: NDArray[np.float64]
    variance: NDArray[np.float64]

    def of(self, rows: NDArray[np.int64]) -> Levels:
        """Return the levels of some groups."""
        return Levels(mean=self.mean[rows], variance=self.variance[rows])


def rest_of_groups(
    tokens: NDArray[np.int64],
    finished: NDArray[np.bool_],
    dist: LogLengths,
    levels: Levels | None = None,
) -> NDArray[np.float64]:
    """Return the expected number of remaining steps of each group, float64 [G].

    It is 0 if all members have finished.

    Args:
        tokens: int64 [G, g], tokens so far of each member; 0 if it was not started.
        finished: bool [G, g].
        levels: levels of the groups from earlier epochs; None if unknown.
    """
    if not tokens.size:
        return np.zeros(len(tokens))
    have = np.log(np.maximum(tokens, 1))
    level, spread = _levels(tokens, finished, dist, levels)
    open_members = np.maximum((~finished).sum(axis=1, keepdims=True), 1)
    at_median = 0.5 ** (1 / open_members)
    passed = np.where(tokens > 0, normal_cdf((have - level) / spread), 0.0)
    quantile = 1 - (1 - passed) * (1 - at_median)
    ends = np.exp(np.minimum(level + spread * normal_quantile(quantile), math.log(dist.cap)))
    rest = np.where(finished, 0.0, np.maximum(ends - tokens, 1.0))
    return rest.max(axis=1)


def observed_logs(
    tokens: NDArray[np.int64], finished: NDArray[np.bool_], dist: LogLengths
) -> NDArray[np.float64]:
    """Return the log length that each response suggests, in the shape of `tokens`.

    `tokens` is int64 of 1 or more. The result is the log of a finished length, and the mean of the
    distribution beyond the tokens of an unfinished one. A response that ended at the cap would have
    continued, so it counts as unfinished.
    """
    have = np.log(np.maximum(tokens, 1))
    z = (have - dist.mean) / dist.deviation
    mills = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) / np.maximum(normal_cdf(-z), 1e-12)
    unfinished = dist.mean + dist.deviation * np.minimum(mills, z + _MILLS_MOST)
    return np.where(finished & (tokens < dist.cap), have, unfinished)


def _levels(
    tokens: NDArray[np.int64],
    finished: NDArray[np.bool_],
    dist: LogLengths,
    before: Levels | None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the level of each group and its members' deviation around it, float64 [G, 1]."""
    seen = observed_logs(tokens, finished, dist)
    known = tokens > 0
    own = (1 - dist.shared) * dist.deviation**2
    expected = dist.mean if before is None else before.mean
    variance = dist.shared * dist.deviation**2 if before is None else before.variance
    precision = 1 / variance + known.sum(axis=1, keepdims=True) / own
    above = np.where(known, seen - expected, 0.0).sum(axis=1, keepdims=True)
    return expected + above / own / precision, np.sqrt(own + 1 / precision)


def normal_cdf(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the normal distribution function, from a table."""
    return np.interp(z, _GRID, _NORMAL)


def normal_quantile(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return quantiles of the normal distribution, from -8 to 8, from a table."""
    return np.interp(p, _NORMAL, _GRID)
