"""Tests a schedule's placement, and moves from a full KV pool to one with room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aprilsched.config import Dispatch, SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.placement import Placement
from aprilsched.planning.presets import sync
from aprilsched.simulation import SimConfig, simulate
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.types import Prompt
from tests.support.driver import Driver
from tests.support.table import each_row


def configured(**dispatch: Any) -> SchedulerConfig:
    return SchedulerConfig(
        batch_groups=4, group_size=2, over_provision=1.0, dispatch=Dispatch(**dispatch)
    )


def epoch(driver: Driver) -> None:
    """Ask for a batch of the four prompts."""
    driver.feed(ev.BatchRequested())
    prompts = tuple(Prompt(input_ids=np.array([1, 2]), key=key) for key in "wxyz")
    driver.feed(ev.PromptsArrived(prompts=prompts))


@each_row(("placement", "engines"), [("auto", 3), ("prefix", 1)])
def test_a_schedule_divides_groups_only_where_no_placement_is_configured(
    placement: Placement, engines: int
) -> None:
    settings = replace(configured(placement=placement), over_provision="auto", group_size=3)
    settings = replace(settings, straggler="in_place")
    driver = Driver(settings, engines=("a", "b", "c"))
    divided = replace(driver.state.plan.schedule, placement="spread")
    driver.feed(ev.Planned(schedule=divided))
    driver.request_batch()
    first = driver.group_ids()[0]
    assert len({driver.sends[key].engine for key in driver.attempts(first)}) == engines
    for group in driver.group_ids():
        driver.finish_group(group, 5)
    assert [plan.places for plan in driver.plans] == [placement == "auto"]


# --- full pools ----------------------------------------------------------------------------------


def crowded(*, received: int | None = None, **dispatch: Any) -> Driver:
    """Two engines with room for 100 tokens. One holds 85 and a request without a token yet, and
    has reported `received` waiting requests, if given."""
    driver = Driver(
        configured(placement="spread", **dispatch),
        engines=("a", "b"),
        kv_tokens=100,
        auto_prompts=False,
    )
    epoch(driver)
    on_a = [key for key in driver.attempts() if driver.sends[key].engine == "a"]
    if received is not None:
        driver.feed(ev.LoadSeen(engine="a", used=0, queued=received))
    for key in on_a[:-1]:
        driver.progress(key, 26)
    return driver


def test_moving_is_refused_where_a_response_keeps_its_version() -> None:
    """An update may come while the request is on its way from one engine to the other."""
    with pytest.raises(ConfigError, match=r'dispatch.migrate .* refused with straggler="run"'):
        SchedulerConfig(straggler="run", dispatch=Dispatch(migrate=True))


@each_row("migrates", [True, False])
def test_a_request_that_waits_for_room_moves_to_an_engine_that_has_it(migrates: bool) -> None:
    driver = crowded(migrate=migrates)
    assert len(driver.aborts) == migrates
    if not migrates:
        return
    (moved,) = driver.aborts
    request = driver.state.in_flight.requests[moved[0]]
    assert not request.rollout.log.size
    driver.settle()
    assert request.engine == "b"
    assert request.attempt == 2


def test_a_request_keeps_its_tokens_moves_once_and_is_computed_again_once() -> None:
    driver = crowded(migrate=True)
    driver.settle()
    in_flight = driver.state.in_flight
    # Now every request on the first engine runs, and their tokens exceed its pool.
    on_a = [key for key in driver.attempts() if driver.sends[key].engine == "a"]
    driver.now += 2
    for key in on_a:
        driver.progress(key, 12)
        driver.now += 2
    assert len(driver.aborts) == 1
    (moved,) = driver.aborts
    request = in_flight.requests[moved[0]]
    driver.settle()
    assert request.engine == "b"
    assert request.rollout.log.size == 38
    assert driver.sent[-1].input_ids.tolist()[:2] == [1, 2]
    assert len(driver.sent[-1].input_ids) == 40
    again = next(key for key in driver.attempts() if key[0] == request.request_id)
    driver.progress(again, 1)
    assert in_flight.counters.tokens_reprefilled >= 40
    driver.now += 2
    for key in [k for k in driver.attempts() if driver.sends[k].engine == "b"]:
        driver.progress(key, 20)
    assert again not in driver.aborts


def test_an_engine_is_looked_at_once_a_second() -> None:
    """A look at every chunk of a full engine would cost more than the chunks."""
    driver = crowded(migrate=True)
    driver.settle()
    on_a = [key for key in driver.attempts() if driver.sends[key].engine == "a"]
    for key in on_a:
        driver.progress(key, 12)
    assert not driver.aborts
    driver.now += 1
    driver.progress(on_a[0], 1)
    assert driver.aborts


def test_nothing_moves_where_every_pool_is_full() -> None:
    full = Driver(
        configured(placement="spread", migrate=True),
        engines=("a", "b"),
        kv_tokens=100,
        auto_prompts=False,
    )
    epoch(full)
    on_a, on_b = ([k for k in full.attempts() if full.sends[k].engine == e] for e in "ab")
    for pair in zip(on_a, on_b, strict=True):
        for key in pair:
            full.progress(key, 24)
    assert not full.aborts


def test_engines_that_do_not_report_their_pool_keep_their_requests() -> None:
    driver = Driver(configured(migrate=True), engines=("a", "b"), auto_prompts=False)
    epoch(driver)
    for key in driver.attempts():
        driver.progress(key, 10_000)
    assert not driver.aborts


def test_what_an_engine_reports_of_its_pool_counts_and_not_what_was_sent_to_it() -> None:
    """Siblings share their prompt's keys, so the contexts together may be more than a pool."""
    driver = crowded(migrate=True, received=0)
    assert not driver.aborts
    driver.now += 2
    driver.feed(ev.LoadSeen(engine="a", used=95, queued=1))
    assert len(driver.aborts) == 1


def test_a_pool_that_others_fill_takes_no_request() -> None:
    driver = crowded(migrate=True, received=0)
    driver.now += 2
    driver.feed(ev.LoadSeen(engine="b", used=95, queued=0))
    driver.feed(ev.LoadSeen(engine="a", used=95, queued=1))
    assert not driver.aborts
    driver.now += 2
    driver.feed(ev.LoadSeen(engine="b", used=0, queued=0))
    driver.feed(ev.LoadSeen(engine="a", used=95, queued=1))
    assert len(driver.aborts) == 1


def test_a_report_counts_for_some_seconds_only() -> None:
    driver = crowded(migrate=True, received=0)
    assert not driver.aborts
    driver.now += 10
    for key in driver.attempts()[:1]:
        driver.progress(key, 1)
    assert len(driver.aborts) == 1


@pytest.mark.long
def test_with_groups_on_one_engine_migration_makes_up_for_full_pools() -> None:
    """Sixteen engines whose pools hold twenty responses, and prompts whose responses are alike."""
    small = SimConfig(kv_tokens=20_000, make_tokens=False)
    config = sync(SchedulerConfig(batch_groups=64, group_size=8))
    stays, moves = (
        simulate(
            LongTailWorkload(within_group=0.9),
            replace(config, dispatch=replace(config.dispatch, migrate=migrate)),
            engines=16,
            engine=small,
            batches=6,
            burn_in=2,
        ).summary
        for migrate in (False, True)
    )
    assert stays.tokens.reprefilled == 0 < moves.tokens.reprefilled
    assert (moves.delivered_tokens_per_s or 0) > 1.1 * (stays.delivered_tokens_per_s or 0)
    assert moves.tokens.reprefilled < 0.15 * moves.tokens.delivered
