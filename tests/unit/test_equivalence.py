"""Tests the two one-sided tests: they say "equal" at the right rate, and not for lack of data."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.equivalence import Margins, equivalence

CAP = 600
Batches = list[NDArray[np.int64]]


def batches(count: int, size: int, seed: int, *, longer: float = 1.0) -> Batches:
    """Batches of groups of 4 of one law; `longer` multiplies lengths before the cap."""
    rng = np.random.default_rng(seed)
    x = np.repeat(rng.standard_normal((count, size // 4)), 4, axis=1) + rng.standard_normal(
        (count, size)
    )
    raw = 60 * longer * np.exp(0.9 * x / sqrt(2))
    return list(np.clip(np.rint(raw), 1, CAP).astype(np.int64))


LAW = [np.concatenate(batches(1000, 400, 12345))]


def acceptance(shift: float, runs: int, count: int, margin: float) -> float:
    """Share of runs whose mean is found equal to the law's."""
    accepted = 0
    for seed in range(runs):
        sample = batches(count, 100, seed, longer=shift)
        found = equivalence(
            sample, LAW, cap=CAP, margins=Margins(relative=margin), resamples=200, seed=seed
        )
        accepted += found["mean"].equivalent
    return accepted / runs


@pytest.mark.long
def test_laws_that_differ_by_the_margin_are_accepted_in_one_of_twenty():
    """The factor of the lengths before the cap is not the factor of the means, so measure that."""
    longer = np.concatenate(batches(1000, 400, 12345, longer=1.08)).mean()
    margin = float(longer / LAW[0].mean() - 1)
    rate = acceptance(1.08, 400, 60, margin)
    assert 0.01 <= rate <= 0.05 + 4 * sqrt(0.05 * 0.95 / 400)


def test_a_shift_of_10_percent_is_refused():
    assert acceptance(1.1, 40, 120, 0.05) == 0
    assert acceptance(0.9, 40, 120, 0.05) == 0
    assert acceptance(1.0, 40, 120, 0.05) > 0.6


def test_too_few_data_are_refused_though_the_laws_are_equal():
    found = equivalence(batches(12, 20, 3), LAW, cap=CAP)
    assert not found.equivalent
    assert found["mean"].low < 0 < found["mean"].high


def test_statistics_and_their_error_by_hand():
    sample = [np.full(10, 10 + i % 2, dtype=np.int64) for i in range(40)]
    found = equivalence(sample, [np.array([10])], cap=11, resamples=4000)
    assert found["mean"].estimate == pytest.approx(0.05)
    # The mean of 40 fair coins, a tenth each: 0.1 * 0.5 / sqrt(40) is one standard error.
    assert found["mean"].high - found["mean"].low == pytest.approx(
        2 * 1.645 * 0.05 / sqrt(40), rel=0.1
    )
    assert found["p90"].estimate == found["p99"].estimate == pytest.approx(0.1)
    assert found["truncation_rate"].estimate == 0.5


def test_blocks_keep_neighbours_together():
    """Short and long batches alternate, so with blocks of two every resample has the same mean."""
    sample = [np.full(10, 10 + 10 * (i % 2), dtype=np.int64) for i in range(40)]
    alone = equivalence(sample, [np.array([15])], cap=99)["mean"]
    paired = equivalence(sample, [np.array([15])], cap=99, block=2)["mean"]
    assert alone.high - alone.low > 0.1
    assert paired.high == paired.low == 0


def test_groups_are_not_taken_as_so_many_responses():
    """Four equal siblings are as informative as one, so the interval must not be half as wide."""
    single = [batch[::4] for batch in batches(200, 400, 2)]
    repeated = [np.repeat(batch, 4) for batch in single]
    one, four = (equivalence(b, LAW, cap=CAP)["mean"] for b in (single, repeated))
    assert four.high - four.low == pytest.approx(one.high - one.low)


def test_what_it_refuses():
    with pytest.raises(ValueError, match="too few"):
        equivalence(batches(9, 40, 2), LAW, cap=CAP)
    with pytest.raises(ValueError, match="too few"):
        equivalence(batches(30, 40, 2), LAW, cap=CAP, block=4)
    with pytest.raises(ValueError, match="is empty"):
        equivalence([*batches(30, 40, 2), np.empty(0, dtype=np.int64)], LAW, cap=CAP)
