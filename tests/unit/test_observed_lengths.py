"""Tests the record of observed lengths: its window, what groups share, resampled groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.distributions import kaplan_meier
from aprilsched.kernel.core.lengths.observed import (
    GroupLengths,
    ObservedLengths,
    iid_distance,
    pooled,
    resampled,
    shared_log_variance,
)
from aprilsched.simulation.workload import LongTailWorkload
from tests.support.table import each_row


def drawn(groups: int, size: int, seed: int, shared: float = 0.5) -> NDArray[np.int64]:
    """Lengths [groups, size] with median 60 and sigma 0.9."""
    rng = np.random.default_rng(seed)
    x = np.sqrt(shared) * rng.standard_normal((groups, 1))
    x = x + np.sqrt(1 - shared) * rng.standard_normal((groups, size))
    return np.clip(np.rint(60 * np.exp(0.9 * x)), 1, 600).astype(np.int64)


def cut_off(lengths: NDArray[np.int64], per_launch: float) -> list[GroupLengths]:
    """Group i was launched `per_launch` tokens before group i + 1, and the run stops now."""
    groups: list[GroupLengths] = []
    for i, row in enumerate(lengths):
        age = int((len(lengths) - i) * per_launch)
        groups.append(GroupLengths(launched=i, tokens=np.minimum(row, age), finished=row <= age))
    return groups


def record(groups: list[GroupLengths], window: int) -> tuple[ObservedLengths, list[GroupLengths]]:
    """A record of the complete groups, in the order of their completion, and of the open ones."""
    observed = ObservedLengths(window=window)
    complete = [group for group in groups if group.complete]
    for group in sorted(complete, key=lambda g: g.launched + int(g.tokens.max())):
        observed.add_group(group)
    return observed, [group for group in groups if not group.complete]


def test_the_window_goes_by_launches_and_not_by_completions():
    observed = ObservedLengths(window=6)
    for launched in (5, 0, 4, 1, 3):
        observed.add_group(GroupLengths.whole(launched, [launched + 1, launched + 1]))
    assert len(observed) == 6
    assert [group.launched for group in observed.cohort()] == [3, 4, 5]
    waiting = GroupLengths(launched=2, tokens=np.array([7]), finished=np.array([False]))
    assert [group.launched for group in observed.cohort([waiting])] == [3, 4, 5]
    young = GroupLengths(launched=9, tokens=np.array([7, 7]), finished=np.array([False, False]))
    assert [group.launched for group in observed.cohort([young])] == [4, 5, 9]


def test_there_is_no_law_before_something_has_finished():
    observed = ObservedLengths()
    young = GroupLengths(launched=1, tokens=np.array([7, 3]), finished=np.array([False, False]))
    assert observed.distribution() is None
    assert observed.distribution([young]) is None
    half = GroupLengths(launched=1, tokens=np.array([7, 3]), finished=np.array([False, True]))
    distribution = observed.distribution([half])
    assert distribution is not None
    assert distribution.observations == 2
    with pytest.raises(ValueError, match="draw later"):
        observed.draw_groups(4, group_size=2, open_groups=[young])


@each_row("shared", [0.0, 0.3, 0.6, 0.9])
def test_the_shared_log_variance_is_found(shared: float):
    rng = np.random.default_rng(5)
    x = np.sqrt(shared) * rng.standard_normal((1500, 1))
    x = x + np.sqrt(1 - shared) * rng.standard_normal((1500, 8))
    lengths = np.rint(5000 * np.exp(0.5 * x)).astype(np.int64)
    groups = [GroupLengths.whole(i, row[: 4 + i % 5].tolist()) for i, row in enumerate(lengths)]
    assert shared_log_variance(groups) == pytest.approx(shared, abs=0.03)


def test_what_does_not_say_how_much_is_shared():
    assert shared_log_variance([]) is None
    assert shared_log_variance([GroupLengths.whole(0, [3, 4])]) is None
    assert shared_log_variance([GroupLengths.whole(i, [3]) for i in range(9)]) is None
    assert shared_log_variance([GroupLengths.whole(i, [3, 3]) for i in range(9)]) is None


def test_groups_are_drawn_whole_and_as_often_as_each_other():
    observed = ObservedLengths()
    for launched, row in enumerate(drawn(50, 4, 1)):
        observed.add_group(GroupLengths.whole(launched, row.tolist()))
    rows = sorted(group.tokens.tolist() for group in observed.cohort())
    groups = observed.draw_groups(150, group_size=4)
    assert sorted(groups.tolist()) == sorted(rows * 3)
    assert groups.tolist() == observed.draw_groups(150, group_size=4).tolist()
    assert groups.tolist() != observed.draw_groups(150, group_size=4, seed=1).tolist()
    assert observed.draw_groups(9, group_size=2).shape == (9, 2)
    with pytest.raises(ValueError, match="no group of 5"):
        observed.draw_groups(9, group_size=5)


def test_groups_of_several_sizes_keep_their_own():
    observed = ObservedLengths()
    for launched, row in enumerate([[3], [4, 5, 6], [7, 8]] * 4):
        observed.add_group(GroupLengths.whole(launched, row))
    open_group = GroupLengths(
        launched=12, tokens=np.array([9, 2]), finished=np.array([True, False])
    )
    groups = observed.draw_groups(26, group_size=None, open_groups=[open_group]).tolist()
    assert all(group in [[3, 0, 0], [4, 5, 6], [7, 8, 0]] for group in groups if group[0] != 9)
    drawn_longer = [group for group in groups if group[0] == 9]
    assert len(drawn_longer) == 2
    assert all(group[1] > 2 and group[2] == 0 for group in drawn_longer)


def test_drawn_groups_are_as_long_as_those_still_open_will_be():
    """A sixth of the cohort is open. Without the open groups, drawn groups would be too short."""
    truth = drawn(100_000, 4, 99).mean()
    means: list[float] = []
    as_is: list[float] = []
    for seed in range(60):
        groups = cut_off(drawn(300, 4, seed), 2.2)
        observed, waiting = record(groups, window=10_000)
        assert len(waiting) > 30
        synthetic = observed.draw_groups(600, group_size=4, open_groups=waiting, seed=seed)
        means.append(float(synthetic.mean()))
        as_is.append(float(np.mean([group.tokens.mean() for group in groups])))
    error = np.std(means) / np.sqrt(60)
    assert np.mean(means) == pytest.approx(truth, abs=4 * error)
    assert np.mean(as_is) < truth - 8 * error


def test_what_is_known_of_an_open_group_stays():
    observed = ObservedLengths()
    observed.add_group(GroupLengths.whole(0, [50, 90]))
    half = GroupLengths(launched=1, tokens=np.array([30, 60]), finished=np.array([True, False]))
    drawn_groups = observed.draw_groups(40, group_size=2, open_groups=[half]).tolist()
    assert sorted(drawn_groups) == [[30, 90]] * 20 + [[50, 90]] * 20


def test_resampling_favours_no_place():
    taken = np.zeros(10)
    for seed in range(3000):
        taken += np.bincount(resampled(10, 3, seed=seed), minlength=10)
    assert taken / 3000 == pytest.approx(np.full(10, 0.3), abs=0.05)


# --- the distance of a batch from the distribution ----------------------------------------------


def test_the_distance_is_the_largest_difference_of_the_two_distribution_functions() -> None:
    distribution = kaplan_meier([1, 2, 3, 4], [False] * 4)
    assert distribution.distance(np.array([1, 2, 3, 4])) == pytest.approx(0)
    assert distribution.distance(np.array([1, 1, 1, 2])) == pytest.approx(0.5)
    assert distribution.distance(np.array([4, 9])) == pytest.approx(0.75)
    assert distribution.distance(np.array([50])) == pytest.approx(1)


@each_row("shared", [0.0, 0.5, 0.9])
def test_the_expected_distance_is_that_of_groups_drawn_at_random(shared: float) -> None:
    """Correlation within groups increases the distance; the value for independent responses would
    be too small."""
    workload = LongTailWorkload(within_group=shared)
    drawn = [GroupLengths.whole(i, workload.lengths(i).tolist()) for i in range(640)]
    tokens, finished = pooled(drawn)
    distribution = kaplan_meier(tokens, ~finished)
    batches = [np.concatenate([g.tokens for g in drawn[i : i + 32]]) for i in range(0, 640, 32)]
    measured = float(np.mean([distribution.distance(batch) for batch in batches]))
    expected = float(np.mean([iid_distance(drawn, 32, seed=s) or 0.0 for s in range(8)]))
    assert measured == pytest.approx(expected, rel=0.12)
    independent = 0.869 / math.sqrt(256)
    assert (expected > 1.2 * independent) is (shared > 0)


def test_without_a_complete_group_no_distance_is_expected() -> None:
    open_ = GroupLengths(launched=0, tokens=np.array([5]), finished=np.array([False]))
    assert iid_distance([open_], 3) is None
    assert iid_distance([GroupLengths.whole(0, [5])], 0) is None
    assert iid_distance([GroupLengths.whole(0, [5])], 2) == 0


def test_groups_that_ran_whole_because_they_are_short_do_not_hide_the_others() -> None:
    """Of 60 groups those of short responses have run whole, and of the others one response has."""
    observed = ObservedLengths(window=10**9)
    deferred: list[GroupLengths] = []
    for index in range(60):
        if index % 3:
            observed.add_group(GroupLengths.whole(index, [100 + index, 90, 110, 105]))
        elif index % 6:
            observed.add_group(GroupLengths.whole(index, [4000, 4100, 3900, 4050]))
        else:
            tokens = np.array([3950, 0, 0, 0], dtype=np.int64)
            finished = np.array([True, False, False, False])
            deferred.append(GroupLengths(launched=index, tokens=tokens, finished=finished))
    drawn = observed.draw_groups(600, group_size=4, open_groups=deferred)
    assert (drawn[:, 0] > 1000).mean() == pytest.approx(1 / 3, abs=0.01)
    assert (drawn > 1000).mean() == pytest.approx(1 / 3, abs=0.02)
    alike = (drawn > 1000).all(axis=1) | (drawn < 1000).all(axis=1)
    assert alike.mean() > 0.9, "what siblings share stays"
