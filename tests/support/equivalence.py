"""Tests whether two length distributions are equal up to a margin: two one-sided tests, by a
bootstrap of batches.

Equivalence is what has to be shown, because a test that finds no difference may only have too
little data. Two one-sided tests at 5 % (Schuirmann, 1987) say "equal" if the 90 % confidence
interval lies inside the margin, so with too little data the answer is "no". Responses of a batch
and of a group are not independent, so whole batches are resampled (Hall, Horowitz and Jing, 1995,
for sequences of several batches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

StatisticName: TypeAlias = Literal["mean", "p90", "p99", "truncation_rate"]

_CONFIDENCE = (0.05, 0.95)
_LEAST_BATCHES = 10
"""Smallest number of blocks. With fewer blocks the percentiles of a bootstrap are much too
narrow."""
_TOGETHER = 256
"""Number of resamples that are computed at a time, to bound memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Margins:
    """The largest differences that count as equal."""

    relative: float = 0.05
    """Margin of the mean and the percentiles, as a share of those of the drawn distribution."""
    truncation: float = 0.01
    """Margin of the share of responses that reach the cap, as a difference of shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistic:
    """The comparison of one statistic.

    Attributes:
        estimate: delivered / drawn - 1; for the truncation rate, delivered minus drawn.
        low: the lower end of the estimate's 90 % confidence interval.
        high: the upper end of that interval.
        margin: the largest difference that counts as equal.
    """

    name: StatisticName
    estimate: float
    low: float
    high: float
    margin: float

    @property
    def equivalent(self) -> bool:
        return -self.margin < self.low and self.high < self.margin


@dataclass(frozen=True, kw_only=True, slots=True)
class Equivalence:
    """The comparison of two distributions."""

    statistics: tuple[Statistic, ...]

    @property
    def equivalent(self) -> bool:
        """Whether every statistic is equivalent."""
        return all(statistic.equivalent for statistic in self.statistics)

    def __getitem__(self, name: StatisticName) -> Statistic:
        return next(statistic for statistic in self.statistics if statistic.name == name)


def equivalence(
    delivered: Sequence[NDArray[np.int64]],
    drawn: Sequence[NDArray[np.int64]],
    *,
    cap: int,
    margins: Margins | None = None,
    resamples: int = 1000,
    block: int = 1,
    seed: int = 0,
) -> Equivalence:
    """Compare delivered with drawn lengths.

    Args:
        delivered: the lengths of each batch, int64 [n], in order and without a burn-in.
        drawn: the drawn lengths of each batch. A single array is taken as the distribution itself,
            without sampling error: lengths that were drawn beforehand, or a large sample.
        cap: the longest response; the share of such responses is the truncation rate.
        margins: the margins; by default 5 %, and 0.01 for the truncation rate.
        resamples: number of resamples of the bootstrap.
        block: number of consecutive batches that are resampled together. Responses that one batch
            leaves over come with the next one, so single batches vary more than they should: with 1
            the answer is "no" too often.
        seed: the seed; the same seed gives the same result.

    Raises:
        ValueError: if there are fewer than 10 blocks of batches to resample, or if a batch is
            empty.
    """
    _check(delivered, drawn, block)
    within = margins or Margins()
    # The lengths are counted instead of sorted, because they are small whole numbers.
    values = np.flatnonzero(np.bincount(np.concatenate((*delivered, *drawn))))
    table, reference = _table(delivered, values), _table(drawn, values)
    here = _statistics(table.sum(axis=0, keepdims=True), values, cap)
    there = _statistics(reference.sum(axis=0, keepdims=True), values, cap)
    rng = np.random.default_rng(seed)
    spread = _difference(
        _bootstrap(table, values, cap, rng, resamples, block),
        _bootstrap(reference, values, cap, rng, resamples, block),
    )
    low, high = np.quantile(spread, _CONFIDENCE, axis=0)
    estimate = _difference(here, there)[0]
    return Equivalence(
        statistics=tuple(
            Statistic(
                name=name,
                estimate=float(estimate[i]),
                low=float(low[i]),
                high=float(high[i]),
                margin=within.truncation if name == "truncation_rate" else within.relative,
            )
            for i, name in enumerate(_NAMES)
        )
    )


_NAMES: tuple[StatisticName, ...] = ("mean", "p90", "p99", "truncation_rate")


def _table(batches: Sequence[NDArray[np.int64]], values: NDArray[np.int64]) -> NDArray[np.float32]:
    """How often each value is in each batch, [batches, values]; exact below 2**24 responses."""
    rows = [np.bincount(batch, minlength=int(values[-1]) + 1)[values] for batch in batches]
    return np.stack(rows).astype(np.float32)


def _bootstrap(
    table: NDArray[np.float32],
    values: NDArray[np.int64],
    cap: int,
    rng: Generator,
    resamples: int,
    block: int,
) -> NDArray[np.float64]:
    """Statistics [resamples, 4] of resampled runs of `block` batches, the last one wrapped."""
    count = len(table)
    if count == 1:
        return _statistics(table, values, cap)
    starts = rng.integers(0, count, (resamples, -(-count // block)))
    chosen = (starts[:, :, None] + np.arange(block)).reshape(resamples, -1)[:, :count] % count
    weights = np.zeros((resamples, count), dtype=np.float32)
    np.add.at(weights, (np.arange(resamples)[:, None], chosen), 1)
    parts = [
        _statistics(weights[i : i + _TOGETHER] @ table, values, cap)
        for i in range(0, resamples, _TOGETHER)
    ]
    return np.concatenate(parts)


def _statistics(
    counts: NDArray[np.float32], values: NDArray[np.int64], cap: int
) -> NDArray[np.float64]:
    """Mean, 90th and 99th percentile, share at the cap: [samples, 4] of counts by value."""
    cumulated = np.cumsum(counts, axis=1, dtype=np.float64)
    total = cumulated[:, -1:]
    places = [(cumulated < q * total).sum(axis=1) for q in (0.9, 0.99)]
    columns = [counts.astype(np.float64) @ values / total[:, 0], *(values[p] for p in places)]
    columns.append(counts[:, values >= cap].sum(axis=1) / total[:, 0])
    return np.stack(columns, axis=1).astype(np.float64)


def _difference(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
    relative = ours[:, :3] / theirs[:, :3] - 1
    return np.concatenate((relative, ours[:, 3:] - theirs[:, 3:]), axis=1)


def _check(
    delivered: Sequence[NDArray[np.int64]], drawn: Sequence[NDArray[np.int64]], block: int
) -> None:
    if block < 1 or len(delivered) < _LEAST_BATCHES * block or not drawn:
        raise ValueError(
            f"{len(delivered)} batches in blocks of {block} are too few; give at least "
            f"{_LEAST_BATCHES} blocks of delivered batches, and what was drawn."
        )
    if any(batch.size == 0 for batch in (*delivered, *drawn)):
        raise ValueError("a batch is empty; leave it out.")
