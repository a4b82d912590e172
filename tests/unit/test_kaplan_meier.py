"""Tests the Kaplan-Meier estimate on small cases by hand, and on known laws."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from aprilsched.core.lengths.kaplan_meier import KaplanMeier, kaplan_meier

SMALL = kaplan_meier([1, 2, 2, 3, 4, 5], [False, False, True, False, True, False])
"""At risk at 1, 2, 3, 5: 6, 5, 3, 1."""


def drawn(n: int, seed: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    lengths = np.rint(np.exp(np.log(60) + 0.9 * rng.standard_normal(n)))
    return np.clip(lengths, 1, 600).astype(np.int64)


def censored(lengths: NDArray[np.int64], seed: int, longest: int = 700) -> KaplanMeier:
    """Censor every second response after a uniform number of tokens."""
    rng = np.random.default_rng(seed)
    at = np.where(rng.random(len(lengths)) < 0.5, rng.integers(0, longest, len(lengths)), 10_000)
    return kaplan_meier(np.minimum(lengths, at), at < lengths)


def test_the_steps_by_hand():
    assert SMALL.lengths.tolist() == [1, 2, 3, 5]
    expected = [5 / 6, 5 / 6 * 4 / 5, 5 / 6 * 4 / 5 * 2 / 3, 0]
    assert SMALL.survival == pytest.approx(expected)
    assert (SMALL.observations, SMALL.tail, SMALL.end) == (6, 0, 5)
    assert SMALL.survival_at([0, 1, 2.5, 4, 5, 9]) == pytest.approx([1, 5 / 6, 2 / 3, 4 / 9, 0, 0])


def test_greenwood_by_hand():
    terms = np.cumsum([1 / (6 * 5), 1 / (5 * 4), 1 / (3 * 2)])
    assert SMALL.variance == pytest.approx([*(SMALL.survival[:3] ** 2 * terms), 0])


def test_means_by_hand():
    mean = 1 + 5 / 6 + 2 / 3 + 2 * 4 / 9
    assert SMALL.mean() == pytest.approx(mean)
    assert SMALL.restricted_mean(3) == pytest.approx(1 + 5 / 6 + 2 / 3)
    assert SMALL.restricted_mean(99) == pytest.approx(mean)
    assert SMALL.residual_mean(2) == pytest.approx((2 / 3 + 8 / 9) / (2 / 3))
    assert SMALL.residual_mean([5, 70]).tolist() == [1, 1], "beyond all that is known: one more"


def test_quantiles_by_hand():
    shares = [0, 1 / 6, 0.17, 1 / 3, 5 / 9, 0.56, 1]
    assert SMALL.quantile(shares).tolist() == [1, 1, 2, 2, 3, 5, 5]
    assert SMALL.residual_quantile([0.2, 0.9], 2).tolist() == [3, 5]
    assert SMALL.residual_quantile(0.5, [5, 70]).tolist() == [6, 71]


def test_without_censoring_it_is_the_empirical_law():
    lengths = drawn(1001, 1)
    law = kaplan_meier(lengths, np.zeros(1001, dtype=np.bool_))
    assert law.mean() == pytest.approx(lengths.mean())
    longer = lengths[lengths > 100]
    assert law.residual_mean(100) == pytest.approx(longer.mean() - 100)
    q = np.array([0.1, 0.5, 0.9, 0.99])
    inverse = np.quantile(lengths, q, method="inverted_cdf")
    assert law.quantile(q).tolist() == inverse.tolist()
    assert law.restricted_mean(80) == pytest.approx(np.minimum(lengths, 80).mean())


def test_an_unfinished_longest_one_leaves_a_tail():
    law = kaplan_meier([2, 5], [False, True])
    assert (law.tail, law.end) == (0.5, 6)
    assert law.mean() == pytest.approx(2 * 0.5 + 6 * 0.5)
    assert law.quantile(0.9) == 6


def test_nothing_finished_is_all_tail():
    law = kaplan_meier([3, 4], [True, True])
    assert (law.tail, law.end) == (1, 5)
    assert law.mean() == 5


def test_censoring_does_not_bias_it_and_does_bias_the_finished_ones():
    """The mean over many samples has a much smaller tolerance than one sample."""
    truth = drawn(400_000, 9)
    means: list[float] = []
    naive: list[float] = []
    for seed in range(100):
        lengths = drawn(800, seed)
        law = censored(lengths, 1000 + seed)
        means.append(law.mean())
        at = np.random.default_rng(1000 + seed)
        looked = np.where(at.random(800) < 0.5, at.integers(0, 700, 800), 10_000)
        naive.append(float(lengths[lengths <= looked].mean()))
    error = float(np.std(means)) / 10
    assert np.mean(means) == pytest.approx(truth.mean(), abs=4 * error)
    assert np.mean(naive) < truth.mean() - 8 * error


def test_delayed_entries_by_hand():
    law = kaplan_meier([4, 6, 10, 8, 5], [False, True, False, False, False], [0, 0, 6, 6, 6])
    # Of two from the beginning one ends at 4, and the other was stopped at 6; two came in there.
    assert law.lengths.tolist() == [4, 8, 10]
    assert law.survival.tolist() == pytest.approx([0.5, 0.25, 0.0])


def test_what_is_stopped_and_drawn_again_beyond_that_gives_the_law():
    """Of each group that was stopped, the second draws count from where the first were stopped. To
    count them from their beginning overstates the prompts that are stopped more often."""
    rng = np.random.default_rng(3)
    level = rng.normal(0, 0.6, (5000, 1))
    first, second = np.exp(5 + level + rng.normal(0, 0.6, (2, 5000, 8))).astype(int) + 1
    at = 300
    again = second[(first > at).any(axis=1)].ravel()
    lengths = np.concatenate((np.minimum(first, at).ravel(), again))
    flags = np.concatenate(((first > at).ravel(), np.zeros(again.size, dtype=bool)))
    entered = np.concatenate((np.zeros(first.size, dtype=int), np.full(again.size, at)))
    mean = kaplan_meier(lengths, flags, entered).mean()
    assert mean == pytest.approx(first.mean(), rel=0.02)
    assert kaplan_meier(lengths, flags).mean() > 1.05 * first.mean()


def test_greenwood_s_variance_is_that_of_the_estimate():
    at = np.array([40, 90, 200])
    laws = [censored(drawn(600, seed), 5000 + seed) for seed in range(300)]
    survival = np.array([law.survival_at(at) for law in laws])
    index = [np.searchsorted(law.lengths, at, side="right") - 1 for law in laws]
    said = np.mean([law.variance[i] for law, i in zip(laws, index, strict=True)], axis=0)
    assert said == pytest.approx(survival.var(axis=0), rel=0.3)


def test_residual_draws_follow_the_law():
    law = censored(drawn(4000, 3), 4)
    u = (np.arange(20_000) + 0.5) / 20_000
    draws = law.residual_quantile(u, 120)
    assert draws.min() > 120
    assert draws.mean() - 120 == pytest.approx(law.residual_mean(120), rel=1e-3)


def test_self_consistency():
    """With the expected length for each censored response, the mean is the same (Efron, 1967)."""
    lengths = drawn(500, 8)
    at = np.random.default_rng(8).integers(0, 300, 500)
    seen, cut = np.minimum(lengths, at), at < lengths
    seen = np.where(cut, seen, np.maximum(seen, 1))
    law = kaplan_meier(seen, cut)
    final = np.where(cut, seen + law.residual_mean(seen), seen)
    assert final.mean() == pytest.approx(law.mean(), rel=1e-9)


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
