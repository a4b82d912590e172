"""Tests sleep in the core: stragglers are kept, and memory calls come in the only legal order."""

from __future__ import annotations

import pytest

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.messages import events as ev
from tests.support.driver import Driver, config, names

TAGS = ("kv_cache", "weights")


def fall_asleep(driver: Driver, tags: tuple[str, ...] = TAGS) -> None:
    driver.feed(ev.SleepRequested(tags=tags))
    driver.settle()
    assert names(driver.sleeps) == ["SleepBegun"]


def test_retract_pauses_flushes_and_releases_with_the_stragglers_inside():
    driver = Driver(config(), engines=("a",))
    assert names(driver.feed(ev.SleepRequested(tags=TAGS))) == ["Pause"]
    assert names(driver.feed(ev.Paused(engine="a"))) == ["Flush"]
    assert names(driver.feed(ev.Flushed(engine="a"))) == ["Release"]
    assert names(driver.feed(ev.Released(engine="a", tags=TAGS))) == ["SleepBegun"]
    assert len(driver.sends) == 8, "the calls stay open"


def test_a_refit_wakes_the_weights_and_the_end_wakes_the_rest():
    driver = Driver(config(), engines=("a",))
    fall_asleep(driver)
    driver.controls.clear()
    (wake,) = driver.feed(ev.UpdateRequested(version=1))
    assert (names([wake]), wake.tags) == (["Wake"], ("weights",))  # type: ignore[union-attr]
    assert names(driver.feed(ev.Woken(engine="a", tags=("weights",)))) == ["RefitBegun"]
    assert names(driver.feed(ev.Refitted(engine="a", version=1))) == ["UpdateFinished"]
    (wake,) = driver.feed(ev.WakeRequested())
    assert wake.tags == ("kv_cache",)  # type: ignore[union-attr]
    last = driver.feed(ev.Woken(engine="a", tags=("kv_cache",)))
    assert names(last) == ["SleepEnded", "Continue"]


def test_the_weights_are_not_released_again_after_the_refit():
    driver = Driver(config())
    fall_asleep(driver)
    driver.update()
    assert {c.released for c in driver.state.fleet.control.engines.values()} == {
        frozenset({"kv_cache"})
    }


@pytest.mark.parametrize("straggler", ["abort", "in_place", "retract"])
def test_stragglers_are_called_back_where_the_engine_cannot_hold_them(straggler: str):
    driver = Driver(config(straggler=straggler), holds_stragglers=False)
    driver.progress_each(driver.attempts(), 5)
    driver.feed(ev.SleepRequested(tags=TAGS))
    assert len(driver.aborts) == 8
    assert not driver.controls, "no pause before they are back"
    driver.settle()
    assert not driver.sends
    assert names(driver.sleeps) == ["SleepBegun"]
    driver.update()
    driver.feed(ev.WakeRequested())
    driver.settle()
    assert {len(send.input_ids) for send in driver.sends.values()} == {2 + 5}


def test_run_lets_them_end_first():
    driver = Driver(config(straggler="run"))
    driver.feed(ev.SleepRequested(tags=TAGS))
    for key in driver.attempts():
        assert not driver.controls
        driver.finish(key)
    driver.settle()
    assert names(driver.sleeps) == ["SleepBegun"]


def test_stragglers_held_in_place_are_continued_before_they_are_called_back():
    driver = Driver(config(straggler="in_place", pace="synchronous"), engines=("a",))
    driver.request_batch()
    driver.finish_groups(driver.group_ids()[:2])
    driver.settle()
    assert driver.state.fleet.control.engines["a"].mode == "paused"
    assert names(driver.feed(ev.SleepRequested(tags=TAGS)))[-1] == "Continue"
    driver.settle()
    assert names(driver.sleeps) == ["SleepBegun"]


def test_weights_that_were_released_and_not_brought_back_never_generate():
    driver = Driver(config())
    fall_asleep(driver)
    driver.feed(ev.WakeRequested())
    driver.settle()
    assert not driver.state.fleet.control.engines
    assert set(driver.state.fleet.control.standby) == {"a", "b"}
    assert not driver.sends
    driver.update()
    assert len(driver.sends) == 8


def test_released_weights_are_inconsistent_if_their_refit_fails():
    driver = Driver(config())
    fall_asleep(driver)
    driver.feed(ev.UpdateRequested(version=1))
    driver.settle_controls()
    driver.answer_refit(a=(0, "no such file"), b=(0, "no such file"))
    assert set(driver.state.fleet.control.standby) == {"a", "b"}
    driver.update()
    released = {control.released for control in driver.state.fleet.control.engines.values()}
    assert released == {frozenset({"kv_cache"})}, "the trainer still has the rest"
    driver.feed(ev.WakeRequested())
    driver.settle()
    assert len(driver.sends) == 8


@pytest.mark.parametrize(("keeps", "tags"), [(True, TAGS), (False, ("kv_cache",))])
def test_engines_wake_without_a_refit_if_their_weights_are_kept(keeps: bool, tags: tuple[str, ...]):
    driver = Driver(config(), keeps_weights=keeps)
    fall_asleep(driver, tags)
    driver.feed(ev.WakeRequested())
    driver.settle()
    assert names(driver.sleeps) == ["SleepBegun", "SleepEnded"]
    assert {c.mode for c in driver.state.fleet.control.engines.values()} == {"running"}


def test_a_synchronous_fleet_wakes_into_its_pause():
    driver = Driver(config(pace="synchronous"))
    driver.request_batch()
    driver.finish_groups(driver.group_ids()[:2])
    driver.settle()
    fall_asleep(driver)
    driver.update()
    driver.feed(ev.WakeRequested())
    driver.settle()
    assert {c.mode for c in driver.state.fleet.control.engines.values()} == {"paused"}
    assert not any(c.released for c in driver.state.fleet.control.engines.values())


def test_an_evaluation_ends_before_the_engines_sleep():
    driver = Driver(config(batch_groups=1, group_size=1, over_provision=1.0))
    driver.feed(ev.BatchRequested())
    driver.evaluate(start=900)
    driver.feed(ev.SleepRequested(tags=TAGS))
    assert not driver.controls
    driver.finish_each(driver.attempts())
    driver.settle()
    assert names(driver.sleeps) == ["SleepBegun"]


def test_an_engine_lost_before_sleep_does_not_delay_the_others():
    driver = Driver(config())
    driver.feed(ev.SleepRequested(tags=TAGS))
    driver.feed(ev.ControlFailed(engine="a", call="pause", cause="timeout"))
    driver.settle()
    assert names(driver.sleeps) == ["SleepBegun"]


def test_sleep_in_a_sleep_is_a_bug():
    driver = Driver(config())
    fall_asleep(driver)
    with pytest.raises(InvariantViolation):
        driver.feed(ev.SleepRequested(tags=TAGS))
