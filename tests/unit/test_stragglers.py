"""Tests which stragglers finish, are aborted or stay, by their cost; and overloaded engines."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from aprilsched.config import Dispatch, SchedulerConfig
from aprilsched.core.messages import events as ev
from aprilsched.core.policies.straggler import Prices
from tests.support.driver import Driver, Key, names, prompts

WAITING_PAYS = Prices(step_seconds=1e-4, prefill_tokens_per_s=100.0)
"""A prefill of 50 tokens takes half a second, 2,048 steps a fifth of one."""
WAITING_IS_DEAR = Prices(step_seconds=1.0, prefill_tokens_per_s=1e6)


config: Any = partial(
    SchedulerConfig,
    batch_groups=2,
    group_size=2,
    over_provision=2.0,
    straggler="choose",
    prices=WAITING_PAYS,
)


KNOWN = (10, 45), (50, 70)
"""The lengths of the first two groups."""


def full_batch(driver: Driver, *, tokens: int = 40) -> list[Key]:
    """A driver whose first batch is full, with stragglers that have these numbers of tokens."""
    driver.request_batch()
    for group_id in driver.group_ids()[2:]:
        for key in driver.attempts(group_id):
            driver.progress(key, tokens)
    fill(driver)
    return driver.attempts()


def fill(driver: Driver) -> None:
    """The first two groups end, and make the batch."""
    for group_id, counts in zip(driver.group_ids(), KNOWN, strict=False):
        for key, count in zip(driver.attempts(group_id), counts, strict=True):
            driver.finish(key, count)
    assert len(driver.batches) == 1, "it does not wait for the stragglers"


def limits(driver: Driver) -> set[int]:
    """The number of tokens that each straggler may still generate."""
    requests = driver.state.in_flight.requests
    return {
        limit - requests[request_id].rollout.log.size
        for request_id, (_, limit) in driver.state.stragglers.run_on.items()
    }


# --- running out ---------------------------------------------------------------------------------


def test_engines_are_paused_only_when_the_last_straggler_has_ended() -> None:
    driver = Driver(config())
    stragglers = full_batch(driver)
    assert len(stragglers) == 4
    for key in stragglers:
        assert not driver.controls
        driver.finish(key, 3)
    driver.settle()
    assert not driver.aborts
    # Nothing is left to pause for.
    assert {control.mode for control in driver.state.fleet.control.engines.values()} == {"running"}


def test_a_straggler_that_reaches_its_limit_is_paused_with_its_tokens() -> None:
    driver = Driver(config())
    stragglers = full_batch(driver)
    (limit,) = limits(driver)
    *ending, last = stragglers
    for key in ending:
        driver.finish(key, 3)
    driver.progress(last, limit - 1)
    assert not driver.controls
    driver.progress(last, 1)
    (pause,) = driver.controls
    assert names([pause]) == ["Pause"]
    assert pause.engine == driver.sends[last].engine
    driver.settle()
    assert driver.attempts() == [last], "it stays inside the pause"


def test_those_at_their_limit_wait_for_the_others_in_engines_that_run() -> None:
    driver = Driver(config())
    first, *others = full_batch(driver)
    (limit,) = limits(driver)
    driver.progress(first, limit)
    assert not driver.controls
    for key in others:
        driver.progress(key, limit)
    assert {control.engine for control in driver.controls} == {"a", "b"}


def test_nobody_runs_out_where_waiting_is_dear() -> None:
    driver = Driver(config(prices=WAITING_IS_DEAR))
    full_batch(driver)
    assert not driver.state.stragglers.run_on
    assert {control.engine for control in driver.controls} == {"a", "b"}


@pytest.mark.parametrize(("unfinished", "waits"), [(1, True), (2, False)])
def test_only_the_last_of_a_group_is_worth_what_its_siblings_tokens_are(
    unfinished: int, waits: bool
) -> None:
    prices = Prices(step_seconds=1e-2, prefill_tokens_per_s=1e9, stale_token_seconds=1e-1)
    driver = Driver(config(prices=prices))
    driver.request_batch()
    for group_id in driver.group_ids()[2:]:
        for place, key in enumerate(driver.attempts(group_id)):
            if place < unfinished:
                driver.progress(key, 40)
            else:
                driver.finish(key, 40)
    fill(driver)
    assert bool(driver.state.stragglers.run_on) is waits


def test_an_update_waits_for_those_that_run_out() -> None:
    driver = Driver(config())
    stragglers = full_batch(driver)
    driver.feed(ev.UpdateRequested(version=1))
    for key in stragglers:
        assert not driver.controls
        assert not driver.refits
        driver.finish(key, 3)
    driver.settle()
    assert driver.state.weights.versions.trainer == 1


def test_an_update_within_a_batch_lets_them_run_out_too() -> None:
    driver = Driver(config())
    stragglers = full_batch(driver)
    for key in stragglers:
        driver.finish(key, 3)
    driver.settle()
    driver.update()
    driver.request_batch()
    assert not driver.sends, "those that ran out make the next batch"
    assert len(driver.batches) == 2
    driver.update()
    driver.request_batch()
    running = driver.attempts()
    for key in running:
        driver.progress(key, 45)
    driver.feed(ev.UpdateRequested(version=3))
    assert not driver.controls
    (limit,) = limits(driver)
    for key in running:
        driver.progress(key, limit)
    driver.settle()
    assert driver.state.weights.versions.trainer == 3
    assert set(driver.attempts()) == set(running)


def test_nothing_new_is_sent_while_they_run_out() -> None:
    driver = Driver(config(over_provision=4.0, dispatch=Dispatch(max_in_flight=4)))
    driver.request_batch()
    for key in driver.attempts():
        driver.progress(key, 50)
        driver.finish(key, 0)
    assert len(driver.batches) == 1
    assert driver.state.stragglers.run_on
    assert driver.state.in_flight.queue
    sent = len(driver.sent)
    while driver.state.stragglers.run_on:
        driver.finish(driver.attempts()[0], 1)
    driver.settle()
    assert len(driver.sent) == sent


def test_an_evaluation_is_sent_while_they_run_out() -> None:
    driver = Driver(config())
    stragglers = full_batch(driver)
    driver.feed(
        ev.EvaluationRequested(evaluation_id=1, prompts=prompts(2, start=900), group_size=1)
    )
    asked = [key for key in driver.attempts() if key not in stragglers]
    assert len(asked) == 2
    for key in [*stragglers, *asked]:
        driver.finish(key, 3)
    driver.settle()
    assert len(driver.evaluations[1].groups) == 2


def test_the_next_batch_does_not_wait_for_those_that_run_out() -> None:
    driver = Driver(config())
    stragglers = full_batch(driver)
    driver.request_batch()
    assert not driver.controls
    assert set(stragglers) < set(driver.attempts())


def test_a_lost_engine_keeps_nobody_waiting_for_its_stragglers() -> None:
    driver = Driver(config())
    full_batch(driver)
    on_b = [key for key, send in driver.sends.items() if send.engine == "b"]
    assert on_b
    driver.feed(ev.EngineLost(engine="a", cause="burnt"))
    for key in on_b:
        driver.finish(key, 3)
    driver.settle()
    assert not driver.state.stragglers.run_on
    driver.update()
    assert driver.state.weights.versions.trainer == 1


# --- what becomes of the KV ----------------------------------------------------------------------


def apart(price: float) -> Prices:
    return Prices(step_seconds=1.0, prefill_tokens_per_s=1000.0, stale_key_seconds=price)


@pytest.mark.parametrize(("price", "called_back"), [(0.0, 0), (1e6, 4)])
def test_those_whose_kv_is_not_worth_keeping_are_called_back_first(
    price: float, called_back: int
) -> None:
    driver = Driver(config(kv_after_refit="apart", prices=apart(price)))
    full_batch(driver)
    assert len(driver.aborts) == called_back
    assert bool(driver.controls) is not bool(called_back)
    while driver.aborts:
        assert not driver.controls
        driver.interrupt(next(iter(driver.aborts)))
    assert not driver.state.stragglers.run_on
    assert len(driver.sends) == 4 - called_back
    if not called_back:
        assert {names([c])[0] for c in driver.controls} == {"Pause"}


def test_short_contexts_are_called_back_and_long_ones_stay_in_place() -> None:
    driver = Driver(config(kv_after_refit="apart", prices=apart(2e-3)))
    driver.request_batch()
    long, short = driver.group_ids()[2:]
    for group_id, tokens in ((long, 65), (short, 1)):
        for key in driver.attempts(group_id):
            driver.progress(key, tokens)
    fill(driver)
    assert set(driver.aborts) == set(driver.attempts(short))
    assert not driver.controls
    while driver.aborts:
        driver.interrupt(next(iter(driver.aborts)))
    modes = {control.mode for control in driver.controls if hasattr(control, "mode")}  # type: ignore[union-attr]
    assert modes == {"in_place"}
    driver.settle()
    driver.update()
    assert "Flush" not in {type(control).__name__ for control in driver.controls}
    assert driver.group_ids() == [long]
    driver.request_batch()
    again = [driver.sends[key] for key in driver.attempts(short)]
    assert {len(send.input_ids) for send in again} == {2 + 1}
    assert {send.cache_key for send in again} == {"1-4"}


def test_the_kv_of_what_recomputes_is_not_weighed() -> None:
    driver = Driver(config(prices=Prices(step_seconds=1.0, stale_key_seconds=1e6)))
    full_batch(driver)
    assert not driver.aborts
    assert {control.mode for control in driver.controls} == {"retract"}  # type: ignore[union-attr]
