"""Tests what is remembered of the lengths of prompts: evidence, age, wrong keys, bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aprilsched.config import SchedulerConfig
from aprilsched.kernel.core.lengths import memory
from aprilsched.kernel.core.lengths.log_lengths import LogLengths, rest_of_groups
from aprilsched.kernel.core.lengths.memory import LengthMemory
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.state.expectation import Expectations
from aprilsched.types import Prompt
from tests.support.driver import Driver
from tests.support.table import each_row

DIST = LogLengths(mean=6.0, deviation=1.0, shared=0.5, cap=6000.0)


def whole(length: int, size: int = 8) -> GroupLengths:
    return GroupLengths.whole(0, [length] * size)


def level(
    known: LengthMemory, key: object, version: int = 0, distribution: LogLengths = DIST
) -> float:
    """By how much the expected log length is above the distribution's."""
    return float(known.levels([key], distribution, version).mean[0, 0]) - distribution.mean


def test_what_is_remembered_says_as_much_as_siblings_would() -> None:
    """The filter's equations give the posterior of a normal random effect, as siblings do."""
    known = LengthMemory()
    known.note(1, whole(2000, size=4), DIST, 0)
    fresh = np.zeros((1, 4), dtype=np.int64)
    open_ = np.zeros((1, 4), dtype=np.bool_)
    remembered = rest_of_groups(fresh, open_, DIST, known.levels([1], DIST, 0))
    siblings = rest_of_groups(
        np.array([[0] * 4 + [2000] * 4], dtype=np.int64),
        np.array([[False] * 4 + [True] * 4]),
        DIST,
    )
    assert remembered[0] == pytest.approx(siblings[0], rel=0.03)


def test_a_later_record_changes_what_is_expected_of_its_prompt() -> None:
    """Also where the first one predicted nothing, so that nothing is learned of how well they
    predict."""
    expectations, distribution = (
        Expectations(),
        LogLengths(mean=math.log(400), deviation=1.0, shared=0.5),
    )
    expectations.memory.note(1, whole(400), distribution, 0)
    before = level(expectations.memory, 1, distribution=distribution)
    expectations.memory.note(1, whole(3000), distribution, 0)
    assert level(expectations.memory, 1, distribution=distribution) > before + 0.5


def test_with_age_it_shrinks_toward_the_law() -> None:
    known = LengthMemory()
    known.note(1, whole(3000), DIST, 10)
    levels = [level(known, 1, version) for version in (10, 500, 1010, 3010, 20_010)]
    assert levels == sorted(levels, reverse=True)
    assert levels[2] == pytest.approx(levels[0] / 2, rel=0.02)
    assert levels[-1] == pytest.approx(0, abs=1e-4)
    new, old = known.levels([1], DIST, 10), known.levels([1], DIST, 20_010)
    assert new.variance[0, 0] < old.variance[0, 0]
    assert old.variance[0, 0] == pytest.approx(DIST.shared * DIST.deviation**2)


def test_a_checkpoint_of_a_later_version_is_as_good_as_new() -> None:
    """After a return to an older checkpoint of the weights, ages would be negative."""
    known = LengthMemory()
    known.note(1, whole(3000), DIST, 50)
    assert level(known, 1, 3) == level(known, 1, 50)


@each_row("right", [True, False])
def test_a_memory_that_predicts_nothing_is_not_believed(right: bool) -> None:
    """Keys that name another prompt each time. The control has right keys and stays believed."""
    known, rng = LengthMemory(), np.random.default_rng(0)
    effects = rng.normal(size=200)
    for epoch in range(5):
        for key in range(200):
            effect = effects[key] if right else rng.normal()
            logs = DIST.mean + math.sqrt(0.5) * (effect + rng.normal(size=8))
            lengths = np.maximum(1, np.exp(logs)).astype(int).tolist()
            known.note(key, GroupLengths.whole(0, lengths), DIST, epoch)
    assert (known.coefficient(DIST) > 0.85) is right
    assert (known.coefficient(DIST) < 0.15) is not right


def test_lengths_against_the_memory_leave_the_law_alone() -> None:
    """An adversary who gives the opposite of what he gave before is not believed, and not believed
    to the contrary either."""
    known = LengthMemory()
    for epoch in range(40):
        known.note(1, whole(3000 if epoch % 2 else 50), DIST, epoch)
        known.note(2, whole(50 if epoch % 2 else 3000), DIST, epoch)
    assert known.coefficient(DIST) == 0
    assert level(known, 1) == level(known, 2) == 0


def test_unfinished_members_count_as_at_least_so_long() -> None:
    known = LengthMemory()
    tokens = np.array([2000, 2000], dtype=np.int64)
    known.note("ended", GroupLengths(launched=0, tokens=tokens, finished=tokens > 0), DIST, 0)
    known.note("cut", GroupLengths(launched=0, tokens=tokens, finished=tokens < 0), DIST, 0)
    assert level(known, "cut") > level(known, "ended") > 0


def test_what_has_no_key_or_no_token_is_not_remembered() -> None:
    known = LengthMemory()
    for key in (None, 2.0, (1, 2), True, ["a"], 2**70):
        assert known.note(key, whole(100), DIST, 0) is None
    nothing = np.zeros(3, dtype=np.int64)
    group = GroupLengths(launched=0, tokens=nothing, finished=nothing > 0)
    assert known.note("a", group, DIST, 0) is None
    assert len(known) == 0


@each_row("kind", [np.int64, np.int32, np.str_, type("Name", (str,), {})])
def test_keys_of_numpy_and_of_subclasses_are_those_of_plain_prompts(kind: Any) -> None:
    key = Prompt(input_ids=np.array([1]), key=kind(7)).key
    assert type(key) in (int, str)
    known = LengthMemory()
    assert known.note(key, whole(100), DIST, 0) is not None


def test_long_keys_are_kept_as_digests() -> None:
    known = LengthMemory()
    one, other = "x" * 10_000, "x" * 9_999 + "\ud800"
    known.note(one, whole(3000), DIST, 0)
    assert level(known, one) > 1
    assert level(known, other) == 0
    assert all(len(str(record.key)) == 32 for record in known)


def test_the_keys_seen_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_KEYS", 3)
    known = LengthMemory()
    for key in (0, 1, 2, 0, 3):
        known.note(key, whole(100), DIST, 0)
    assert [record.key for record in known] == [2, 0, 3]


def test_lengths_that_end_at_once_or_never_give_finite_levels() -> None:
    known = LengthMemory()
    for distribution in (
        LogLengths(),
        DIST,
        LogLengths.estimated(mean=0, deviation=0, shared=0, cap=1),
    ):
        for version, length in enumerate((1, 2**40, 1)):
            known.note(1, whole(length), distribution, version)
            levels = known.levels([1], distribution, 10**9)
            assert np.isfinite(levels.mean).all()
            assert (levels.variance > 0).all()


# --- in the scheduler ----------------------------------------------------------------------------


def epochs(driver: Driver, lengths: dict[str, int], times: int) -> None:
    """Deliver batches of these prompts, as often, each response with the length of its key."""
    for _ in range(times):
        driver.feed(ev.BatchRequested())
        prompts = tuple(Prompt(input_ids=np.array([1, 2]), key=key) for key in lengths)
        driver.feed(ev.PromptsArrived(prompts=prompts))
        for key in driver.attempts():
            rollout = driver.state.in_flight.rollouts[driver.sends[key].rollout_id]
            name = rollout.group.prompt.key
            assert isinstance(name, str)
            driver.finish(key, lengths[name])


def test_the_rest_of_a_group_is_known_before_its_first_token() -> None:
    driver = Driver(
        SchedulerConfig(batch_groups=2, group_size=4, over_provision=1.0), auto_prompts=False
    )
    epochs(driver, {"long": 900, "short": 20}, 3)
    driver.feed(ev.BatchRequested())
    prompts = tuple(Prompt(input_ids=np.array([1]), key=key) for key in ("short", "new"))
    driver.feed(ev.PromptsArrived(prompts=prompts))
    groups = list(driver.state.in_flight.training_groups())
    assert [group.prompt.key for group in groups] == ["short", "new"]
    short, new = driver.state.expectations.rest(groups)
    assert short < 60 < new
    request = groups[0].members[0].request
    other = groups[1].members[0].request
    assert request is not None
    assert other is not None
    remaining = driver.state.expectations.remaining
    assert remaining(request) < 0.3 * remaining(other)


def test_a_single_group_is_not_a_sample_of_a_law() -> None:
    """A stream delivers groups one by one; asking for all lengths each time is quadratic."""

    def flight() -> Iterator[Any]:
        raise AssertionError("it asks for all groups in flight")
        yield

    group: Any = object()
    assert Expectations().distances([group], flight()) is None
