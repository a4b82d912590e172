"""Tests the Kaplan-Meier estimate on small cases by hand, and on known distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.distributions import KaplanMeier, kaplan_meier

SMALL = kaplan_meier([1, 2, 2, 3, 4, 5], [False, False, True, False, True, False])
"""At risk at 1, 2, 3, 5: 6, 5, 3, 1."""


def test_the_steps_by_hand():
    assert SMALL.lengths.tolist() == [1, 2, 3, 5]
    expected = [5 / 6, 5 / 6 * 4 / 5, 5 / 6 * 4 / 5 * 2 / 3, 0]
    assert SMALL.survival == pytest.approx(expected)
    assert (SMALL.observations, SMALL.tail, SMALL.end) == (6, 0, 5)
    assert SMALL.survival_at([0, 1, 2.5, 4, 5, 9]) == pytest.approx([1, 5 / 6, 2 / 3, 4 / 9, 0, 0])


def test_means_by_hand():
    mean = 1 + 5 / 6 + 2 / 3 + 2 * 4 / 9
    assert SMALL.mean() == pytest.approx(mean)
    assert SMALL.residual_mean(2) == pytest.approx((2 / 3 + 8 / 9) / (2 / 3))
    assert SMALL.residual_mean([5, 70]).tolist() == [1, 1], "beyond all that is known: one more"


def test_quantiles_by_hand():
    shares = [0, 1 / 6, 0.17, 1 / 3, 5 / 9, 0.56, 1]
    assert SMALL.quantile(shares).tolist() == [1, 1, 2, 2, 3, 5, 5]
    assert SMALL.residual_quantile([0.2, 0.9], 2).tolist() == [3, 5]
    assert SMALL.residual_quantile(0.5, [5, 70]).tolist() == [6, 71]


def test_an_unfinished_longest_one_leaves_a_tail():
    distribution = kaplan_meier([2, 5], [False, True])
    assert (distribution.tail, distribution.end) == (0.5, 6)
    assert distribution.mean() == pytest.approx(2 * 0.5 + 6 * 0.5)
    assert distribution.quantile(0.9) == 6


@pytest.mark.parametrize(
    ("lengths", "flags", "part"),
    [
        ([], [], "at least one"),
        ([1, 2], [True], "one flag"),
        ([0], [False], "below 1"),
        ([-1], [True], "below 1"),
    ],
)
def test_what_it_refuses(lengths: list[int], flags: list[bool], part: str):
    with pytest.raises(ValueError, match=part):
        kaplan_meier(lengths, flags)


def seen_for(lengths: NDArray[np.int64], most: int, seed: int) -> KaplanMeier:
    """Observe responses that started at random times of a run that has lasted `most` tokens."""
    at = np.random.default_rng(seed).integers(1, most, len(lengths))
    return kaplan_meier(np.minimum(lengths, at), at < lengths)


def log_normal(sigma: float, n: int, seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    return np.clip(np.rint(175 * np.exp(sigma * rng.standard_normal(n))), 1, 4000).astype(np.int64)


def two_modes(n: int, seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    long = rng.random(n) < 0.2
    centre: NDArray[np.float64] = np.where(long, math.log(2000), math.log(200))
    return np.rint(np.exp(centre + 0.2 * rng.standard_normal(n))).astype(np.int64)


def moments(distribution: KaplanMeier) -> tuple[float, float]:
    """The mean of a distribution, and the mean of its squares."""
    q = (np.arange(20_000) + 0.5) / 20_000
    lengths = distribution.quantile(q).astype(np.float64)
    return float(lengths.mean()), float((lengths**2).mean())


@pytest.mark.parametrize(("sigma", "longest"), [(0.9, 800), (1.1, 1500)])
def test_a_completed_law_has_the_unobserved_tail(sigma: float, longest: int):
    """Means over 20 samples, each of which is known to several percent."""
    found: list[tuple[float, float]] = []
    before: list[tuple[float, float]] = []
    for seed in range(20):
        distribution = seen_for(log_normal(sigma, 2500, seed), longest, 100 + seed)
        before.append(moments(distribution))
        found.append(moments(distribution.completed(4000)))
    truth = log_normal(sigma, 400_000, 9).astype(np.float64)
    mean, square = float(truth.mean()), float((truth**2).mean())
    assert np.mean([m for m, _ in found]) == pytest.approx(mean, rel=0.05)
    assert np.mean([s for _, s in found]) == pytest.approx(square, rel=0.2)
    assert np.mean([s for _, s in before]) < np.mean([s for _, s in found]) < 1.2 * square
    assert abs(np.mean([s for _, s in found]) - square) < 0.6 * abs(
        np.mean([s for _, s in before]) - square
    )


def test_a_gap_before_the_longest_lengths_does_not_make_their_tail_long():
    """One log-normal distribution through both modes would expect three times the mean."""
    truth = two_modes(400_000, 9)
    means = [
        seen_for(two_modes(2500, seed), 2100, seed).completed(30_000).mean() for seed in range(20)
    ]
    assert np.mean(means) == pytest.approx(truth.mean(), rel=0.25)


def test_a_completed_law_is_the_same_up_to_where_responses_were_seen():
    distribution = seen_for(log_normal(1.1, 2500, 1), 1500, 2)
    whole = distribution.completed(4000)
    known = distribution.lengths[distribution.at_risk >= 10]
    assert whole.survival_at(known) == pytest.approx(distribution.survival_at(known))
    assert (np.diff(whole.lengths) > 0).all()
    assert (np.diff(whole.survival) < 0).all()
    assert (whole.tail, whole.end, whole.survival[-1]) == (0, whole.lengths[-1], 0)
    assert len(whole.at_risk) == len(whole.lengths)
    assert whole.end <= 4000
    assert distribution.completed(1480).end == 1480
    assert distribution.completed(1).end == distribution.longest[0] + 1, (
        "ten have more tokens already"
    )


def test_the_last_observed_end_is_not_the_end_of_the_law():
    """Three of 400 responses started first. When the last of them ends, others may still become
    longer."""
    lengths = log_normal(0.9, 400, 3)
    at = np.concatenate(([10_000, 10_000, 10_000], np.full(397, 300)))
    lengths[:3] = (100, 420, 460)
    distribution = kaplan_meier(np.minimum(lengths, at), at < lengths)
    assert (distribution.tail, distribution.end) == (0, 460)
    whole = distribution.completed(4000)
    assert whole.end > 900
    assert whole.survival_at(460) > 0.08


def test_a_completed_law_does_not_end_before_what_still_runs():
    """A tail that starts at the last observed end would give the forty a mean of 250 tokens."""
    lengths = np.concatenate((np.arange(20, 380), np.full(40, 5000)))
    distribution = kaplan_meier(lengths, lengths == 5000)
    whole = distribution.completed(32_000)
    assert whole.survival_at(4999) == pytest.approx(0.1)
    assert whole.mean() > distribution.mean()
    assert whole.residual_quantile(0.5, 5000) > 5001


def test_a_law_of_which_all_is_seen_is_complete():
    lengths = log_normal(1.1, 500, 4)
    distribution = kaplan_meier(lengths, np.zeros(500, dtype=np.bool_))
    assert distribution.completed(10**6) is distribution
    assert SMALL.completed(100) is SMALL, "there is too little for a guess"
    nothing = kaplan_meier([3, 4], [True, True])
    assert nothing.completed(100) is nothing
