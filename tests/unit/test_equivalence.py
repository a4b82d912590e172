"""Tests the two one-sided tests: they say "equal" at the right rate, and not for lack of data."""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from tests.support.equivalence import Margins, equivalence

CAP = 600
Batches = list[NDArray[np.int64]]


def batches(count: int, size: int, seed: int, *, longer: float = 1.0) -> Batches:
    """Batches of groups of 4 of one distribution; `longer` multiplies lengths before the cap."""
    rng = np.random.default_rng(seed)
    x = np.repeat(rng.standard_normal((count, size // 4)), 4, axis=1) + rng.standard_normal(
        (count, size)
    )
    raw = 60 * longer * np.exp(0.9 * x / sqrt(2))
    return list(np.clip(np.rint(raw), 1, CAP).astype(np.int64))


DIST = [np.concatenate(batches(1000, 400, 12345))]


def acceptance(shift: float, runs: int, count: int, margin: float) -> float:
    """Share of runs whose mean is found equal to the distribution's."""
    accepted = 0
    for seed in range(runs):
        sample = batches(count, 100, seed, longer=shift)
        found = equivalence(
            sample, DIST, cap=CAP, margins=Margins(relative=margin), resamples=200, seed=seed
        )
        accepted += found["mean"].equivalent
    return accepted / runs


def test_a_shift_of_10_percent_is_refused():
    assert acceptance(1.1, 40, 120, 0.05) == 0
    assert acceptance(0.9, 40, 120, 0.05) == 0
    assert acceptance(1.0, 40, 120, 0.05) > 0.6


def test_too_few_data_are_refused_though_the_laws_are_equal():
    found = equivalence(batches(12, 20, 3), DIST, cap=CAP)
    assert not found.equivalent
    assert found["mean"].low < 0 < found["mean"].high


def test_a_tail_that_was_cut_is_found_where_the_mean_hardly_shows_it():
    sample = batches(400, 100, 5)
    cut = [np.minimum(batch, 400) for batch in sample]
    found = equivalence(cut, [np.concatenate(sample)], cap=CAP)
    assert found["mean"].equivalent
    assert found["p90"].equivalent
    assert not found["p99"].equivalent
    assert found["truncation_rate"].estimate < 0
