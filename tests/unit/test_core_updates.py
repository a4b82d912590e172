"""Tests updates in the core: order of control calls by straggler rule, versions, failures."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.state.weights import PHASES, Update, UpdateKind, UpdatePhase
from aprilsched.kernel.store import MemoryStore
from tests.support.driver import Driver, Key, config, names, prompts, span
from tests.support.table import each_row


@each_row("kind", UpdateKind)
@each_row("start", UpdatePhase)
@each_row("finish", UpdatePhase)
def test_an_update_enters_only_the_next_phase_of_its_kind(
    kind: UpdateKind, start: UpdatePhase, finish: UpdatePhase
):
    update = Update(version=1, kind=kind)
    update.phase = start
    if (start, finish) in pairwise(PHASES[kind]):
        update.enter(finish)
        assert update.phase is finish
    else:
        with pytest.raises(InvariantViolation, match=f"cannot go from {start} to {finish}"):
            update.enter(finish)


def test_retract_pauses_flushes_refits_and_continues_in_this_order():
    driver = Driver(config(straggler="retract"), engines=("a",))
    assert names(driver.feed(ev.UpdateRequested(version=1))) == ["Pause"]
    assert names(driver.feed(ev.Paused(engine="a"))) == ["Flush"]
    assert names(driver.feed(ev.Flushed(engine="a"))) == ["RefitBegun"]
    last = driver.feed(ev.Refitted(engine="a", version=1))
    assert names(last) == ["UpdateFinished", "Continue"]
    driver.feed(ev.Continued(engine="a"))
    assert driver.state.weights.versions.engines == {"a": 1}


def test_in_place_keeps_the_cache():
    driver = Driver(config(straggler="in_place"), engines=("a",))
    (pause,) = driver.feed(ev.UpdateRequested(version=1))
    assert pause == do.Pause(engine="a", mode="in_place")
    assert names(driver.feed(ev.Paused(engine="a"))) == ["RefitBegun"]


def test_a_refit_starts_once_every_engine_is_paused_and_flushed():
    driver = Driver(config())
    driver.feed(ev.UpdateRequested(version=1))
    for event in (ev.Paused(engine="a"), ev.Flushed(engine="a"), ev.Paused(engine="b")):
        assert "RefitBegun" not in names(driver.feed(event))
    assert names(driver.feed(ev.Flushed(engine="b"))) == ["RefitBegun"]


def test_abort_calls_everything_back_before_it_pauses_and_sends_it_again_with_its_tokens():
    driver = Driver(config(straggler="abort"))
    keys = driver.attempts()
    driver.progress_each(keys, 5)
    commands = driver.feed(ev.UpdateRequested(version=1))
    assert names(commands) == ["Abort"] * len(keys)
    for key in keys[:-1]:
        driver.interrupt(key)
        assert not driver.controls
    driver.interrupt(keys[-1])
    assert names(driver.controls) == ["Pause", "Pause"]
    driver.settle()
    assert len(driver.sends) == len(keys)
    again = next(iter(driver.sends.values()))
    assert len(again.input_ids) == 2 + 5
    assert again.sampling.max_new_tokens == 1024 - 5
    assert driver.state.in_flight.counters.tokens_reprefilled == 0, "counted when tokens arrive"
    driver.progress(next(iter(driver.sends)), 1)
    assert driver.state.in_flight.counters.tokens_reprefilled == 7


def test_run_waits_for_the_stragglers_and_mixes_no_versions():
    driver = Driver(config(straggler="run"))
    driver.feed(ev.UpdateRequested(version=1))
    assert not driver.controls
    for key in driver.attempts():
        assert not driver.controls
        driver.finish(key)
    driver.settle()
    assert driver.state.weights.versions.trainer == 1


def test_an_abort_that_meets_the_last_token_ends_the_rollout():
    driver = Driver(config(straggler="abort", batch_groups=1, group_size=1))
    driver.feed(ev.BatchRequested())
    (key, *_) = driver.attempts()
    driver.progress(key, 1024)
    driver.feed(ev.UpdateRequested(version=1))
    driver.settle()
    (rollout,) = driver.batches[0].rollouts
    assert (len(rollout), rollout.finish_reason) == (1024, "length")


def test_spans_of_the_engine_replace_what_was_recorded_while_streaming():
    driver = Driver(config(batch_groups=1, group_size=1, over_provision=1.0))
    driver.feed(ev.BatchRequested())
    (key,) = driver.attempts()
    driver.progress(key, 10)
    driver.update()
    spans = (
        span(0, 14),
        span(1, 14, 14),
        span(1, 20, 14),
    )
    driver.finish(key, 10, spans=spans)
    (rollout,) = driver.batches[0].rollouts
    assert rollout.versions.tolist() == [0] * 14 + [1] * 6
    assert [(s.start, s.end, s.version) for s in rollout.segments] == [(0, 14, 0), (14, 20, 1)]
    assert rollout.versions_exact


def test_a_rollout_across_a_refit_without_spans_is_not_exact():
    driver = Driver(config(batch_groups=1, group_size=1, over_provision=1.0))
    driver.feed(ev.BatchRequested())
    (key,) = driver.attempts()
    driver.progress(key, 10)
    driver.update()
    driver.finish(key, 10)
    assert [r.versions_exact for r in driver.batches[0].rollouts] == [False]


def test_spans_of_a_continuation_are_offset_by_earlier_tokens():
    driver = Driver(config(straggler="abort", batch_groups=1, group_size=1, over_provision=1.0))
    driver.feed(ev.BatchRequested())
    (key,) = driver.attempts()
    driver.progress(key, 10)
    driver.feed(ev.UpdateRequested(version=1))
    driver.interrupt(key, spans=(span(0, 10),))
    driver.settle()
    (key,) = driver.attempts()
    driver.finish(key, 4, spans=(span(1, 4),))
    (rollout,) = driver.batches[0].rollouts
    assert rollout.versions.tolist() == [0] * 10 + [1] * 4
    assert rollout.versions_exact


def test_a_synchronous_trainer_finds_the_engines_paused_and_gets_them_back_at_its_next_batch():
    driver = Driver(config(pace="synchronous"))
    driver.request_batch()
    driver.finish_groups(driver.group_ids()[:2])
    driver.settle()
    assert {c.mode for c in driver.state.fleet.control.engines.values()} == {"paused"}
    driver.update()
    assert {c.mode for c in driver.state.fleet.control.engines.values()} == {"paused"}
    driver.request_batch()
    assert {c.mode for c in driver.state.fleet.control.engines.values()} == {"running"}


def test_a_refit_that_fails_everywhere_keeps_the_old_version():
    driver = Driver(config())
    driver.feed(ev.UpdateRequested(version=1))
    driver.settle_controls()
    driver.answer_refit(a=(0, "no space"), b=(0, "no space"))
    assert "no space" in driver.updates[0].cause
    assert driver.state.weights.versions.trainer == 0
    assert {type(c) for c in driver.controls} == {do.Continue}
    driver.settle()
    driver.update()
    assert driver.state.weights.versions.trainer == 1


def test_rollouts_of_a_quarantined_engine_continue():
    driver = Driver(config())
    driver.progress_each(driver.attempts(), 5)
    driver.feed(ev.UpdateRequested(version=1))
    driver.settle_controls()
    driver.answer_refit(b=(0, "corrupt file"))
    assert [loss.engine for loss in driver.lost] == ["b"]
    assert driver.updates[0].failed == (("b", "corrupt file"),)
    driver.settle()
    assert {send.engine for send in driver.sends.values()} == {"a"}
    assert len(driver.sends) == 8


def test_an_engine_that_claims_success_with_another_version_is_quarantined():
    driver = Driver(config())
    driver.feed(ev.UpdateRequested(version=1))
    driver.settle_controls()
    driver.answer_refit(b=(0, ""))
    assert "reports version 0" in driver.lost[0].cause


def test_a_pause_that_fails_costs_the_engine_and_not_the_update():
    driver = Driver(config())
    driver.feed(ev.UpdateRequested(version=1))
    driver.controls.pop(0)
    driver.feed(ev.ControlFailed(engine="a", call="pause", cause="timeout"))
    driver.settle()
    assert driver.state.weights.versions.engines == {"b": 1}


def test_an_update_waits_for_an_engine_where_the_last_one_is_lost_before_any_weights_are():
    driver = Driver(config(), engines=("a",))
    driver.feed(ev.UpdateRequested(version=1))
    driver.feed(ev.EngineLost(engine="a", cause="gone"))
    assert driver.lost[0].last
    assert not driver.updates
    driver.come_back("a")
    driver.settle()
    assert driver.updates[0].cause == ""
    assert driver.state.weights.versions.engines == {"a": 1}


def test_an_update_ends_where_the_last_engine_is_lost_while_it_loads_the_weights():
    driver = Driver(config(), engines=("a",))
    driver.feed(ev.UpdateRequested(version=1))
    driver.settle_controls()
    driver.feed(ev.EngineLost(engine="a", cause="gone"))
    assert driver.updates[0].cause == "a: gone"


# --- keys of older weights ------------------------------------------------------------------------


KEEPING: list[tuple[dict[str, Any], bool]] = [
    ({"straggler": "retract"}, False),
    ({"straggler": "in_place"}, True),
    ({"straggler": "in_place", "kv_after_refit": "apart"}, True),
]


def _crossed(driver: Driver) -> Key:
    """An attempt with ten tokens before a refit and ten after it."""
    driver.request_batch()
    (key,) = driver.attempts()
    driver.progress(key, 10)
    driver.update()
    assert driver.state.weights.versions.trainer == 1
    driver.progress(key, 10)
    return key


@pytest.mark.parametrize(("settings", "stale"), KEEPING)
@pytest.mark.parametrize("restarts", [False, True])
def test_a_rollout_whose_kv_outlived_a_refit_is_marked(
    settings: dict[str, Any], stale: bool, restarts: bool
):
    driver = Driver(
        config(batch_groups=1, group_size=1, over_provision=1.0, **settings),
        store=MemoryStore() if restarts else None,
    )
    key = _crossed(driver)
    if restarts:
        driver.save()
        driver.restart([1] * len(driver.engines))
        driver.request_batch()
        (key,) = driver.attempts()
    driver.finish(key, 10)
    (rollout,) = driver.batches[0].rollouts
    assert rollout.stale_keys is stale


@pytest.mark.parametrize("straggler", ["abort", "run"])
def test_what_no_refit_met_has_no_stale_keys(straggler: str):
    driver = Driver(config(batch_groups=1, group_size=1, over_provision=1.0, straggler=straggler))
    driver.request_batch()
    (key,) = driver.attempts()
    driver.progress(key, 10)
    driver.feed(ev.UpdateRequested(version=1))
    if straggler == "abort":
        driver.interrupt(key, spans=(span(0, 10),))
        driver.settle()
        (key,) = driver.attempts()
    driver.finish(key, 4)
    driver.settle()
    assert [r.stale_keys for r in driver.batches[0].rollouts] == [False]


def test_a_rollout_that_ended_in_the_pause_has_no_stale_keys():
    driver = Driver(config(batch_groups=1, group_size=1, over_provision=1.0, straggler="in_place"))
    driver.request_batch()
    (key,) = driver.attempts()
    driver.progress(key, 10)
    driver.update()
    driver.finish(key, 0, spans=(span(0, 10),))
    assert [r.stale_keys for r in driver.batches[0].rollouts] == [False]


def test_an_evaluation_during_an_update_has_the_new_version():
    """Otherwise frequent evaluations would keep an update waiting forever."""
    driver = Driver(config(pace="synchronous"))
    evaluate = [
        ev.EvaluationRequested(evaluation_id=number, prompts=prompts(1), group_size=1)
        for number in (1, 2)
    ]
    driver.feed(evaluate[0])
    (first,) = driver.attempts()
    driver.feed(ev.UpdateRequested(version=1))
    driver.feed(evaluate[1])
    assert driver.attempts() == [first]
    driver.finish(first)
    driver.settle()
    (second,) = driver.attempts()
    driver.finish(second)
    found = {
        number: [r.versions.tolist() for r in e.rollouts]
        for number, e in driver.evaluations.items()
    }
    assert found == {1: [[0, 0, 0]], 2: [[1, 1, 1]]}
