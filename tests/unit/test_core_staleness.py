"""The staleness bound: the admission gate, and the rules mask, evict and finish."""

from __future__ import annotations

import pytest

from aprilsched.config import SchedulerConfig
from tests.support.driver import Driver


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "batch_groups": 2,
        "group_size": 1,
        "over_provision": 4.0,
        "max_staleness": 1,
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def step(driver: Driver, *, keep: int | None = None) -> None:
    """One batch and one update; `keep` is the group that never finishes by itself."""
    before = len(driver.batches)
    driver.request_batch()
    for key in driver.attempts():
        driver.progress(key, 2)
    for group_id in driver.group_ids():
        if len(driver.batches) > before:
            break
        if group_id != keep:
            driver.finish_group(group_id)
    driver.settle()
    driver.update()


@pytest.mark.parametrize(("bound", "launched"), [(0, 2), (1, 4), (2, 6), (None, 8)])
def test_the_gate_admits_what_can_be_consumed_in_time(bound: int | None, launched: int):
    driver = Driver(config(max_staleness=bound))
    driver.request_batch()
    assert len(driver.sends) == launched


def test_the_gate_lets_a_trainer_take_several_batches_under_one_version():
    driver = Driver(config(max_staleness=0))
    for _ in range(5):
        driver.request_batch()
        for group_id in driver.group_ids():
            driver.finish_group(group_id)
    assert len(driver.batches) == 5


def test_mask_delivers_old_tokens_with_loss_mask_0():
    driver = Driver(config(staleness_rule="mask"))
    driver.request_batch()
    slow = driver.group_ids()[0]
    for _ in range(3):
        step(driver, keep=slow)
    driver.request_batch()
    driver.finish_group(slow)
    for group_id in driver.group_ids():
        driver.finish_group(group_id)
    (rollout,) = (r for b in driver.batches for r in b.rollouts if r.group_id == slow)
    consumed = next(b.version for b in driver.batches for g in b.groups if g.group_id == slow)
    assert rollout.loss_mask.tolist() == (rollout.versions >= consumed - 1).tolist()
    assert not rollout.loss_mask.all()
    assert driver.state.book.counters.tokens_masked == (~rollout.loss_mask).sum()


def test_evict_names_the_group_in_the_ledger_at_the_update_that_makes_it_too_old():
    driver = Driver(config(staleness_rule="evict"))
    driver.request_batch()
    slow = driver.group_ids()[0]
    step(driver, keep=slow)
    assert slow in driver.state.book.groups
    step(driver, keep=slow)
    assert slow not in driver.state.book.groups
    assert driver.state.book.ledger.rollouts == {"stale": 1}
    assert driver.state.book.counters.tokens_discarded > 0


def test_finish_holds_the_batch_for_what_would_be_too_old_afterwards():
    driver = Driver(config(staleness_rule="finish"))
    driver.request_batch()
    slow = driver.group_ids()[0]
    step(driver, keep=slow)
    driver.request_batch()
    for group_id in driver.group_ids():
        if group_id != slow:
            driver.finish_group(group_id)
    assert len(driver.batches) == 1, "the batch waits for the group that is due"
    driver.finish_group(slow)
    assert slow in [group.group_id for group in driver.batches[1].groups]


def test_finish_keeps_the_bound_over_many_steps():
    driver = Driver(config(staleness_rule="finish", batch_groups=3, over_provision=3.0))
    for turn in range(30):
        before = len(driver.batches)
        driver.request_batch()
        for key in driver.attempts():
            driver.progress(key, 1)
        while len(driver.batches) == before:
            ids = driver.group_ids()
            driver.finish_group(ids[(turn * 7) % len(ids)], count=1)
        driver.settle()
        driver.update()
    worst = max(r.staleness(b.version) for b in driver.batches for r in b.rollouts)
    assert worst == 1
    assert driver.state.book.counters.tokens_masked == 0
