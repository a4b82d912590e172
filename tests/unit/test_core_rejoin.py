"""Tests engines that fail a refit, are lost and come back: they rejoin at the fleet's version."""

from __future__ import annotations

from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts as of
from tests.support.driver import Driver, config, span


def refit(driver: Driver, **outcome: tuple[int | None, str]) -> None:
    """An update, up to the point where the engines answer."""
    driver.feed(ev.UpdateRequested(version=driver.state.weights.versions.trainer + 1))
    driver.settle_controls()
    driver.answer_refit(**outcome)


def standby(driver: Driver) -> set[str]:
    return set(driver.state.fleet.control.standby)


def test_an_engine_that_kept_the_old_weights_stands_by_and_the_next_refit_brings_it_back():
    driver = Driver(config())
    refit(driver, b=(0, "no space"))
    assert driver.lost[0].standby
    assert standby(driver) == {"b"}
    driver.settle()
    assert {send.engine for send in driver.sends.values()} == {"a"}
    driver.update()
    assert driver.state.weights.versions.engines == {"a": 2, "b": 2}
    assert driver.admitted == [of.EngineAdmitted(engine="b", version=2)]
    assert {c.mode for c in driver.state.fleet.control.engines.values()} == {"running"}


def test_a_carried_response_of_an_engine_that_fails_a_refit_is_not_exact():
    driver = Driver(config(batch_groups=1, group_size=1, over_provision=1.0))
    driver.feed(ev.BatchRequested())
    (key,) = driver.on("a")
    driver.progress(key, 10)
    driver.update()
    # This chunk may contain tokens that were sampled before the pause, under version 0.
    driver.progress(key, 10, label=1)
    refit(driver, a=(1, "no space"))
    driver.settle()
    (key,) = driver.on("b")
    driver.finish(key, 4, spans=(span(2, 4),))
    (rollout,) = driver.batches[0].rollouts
    assert rollout.versions.tolist() == [0] * 10 + [1] * 10 + [2] * 4
    assert not rollout.versions_exact


def test_inconsistent_engines_are_on_standby_while_others_run():
    driver = Driver(config())
    refit(driver, a=(0, "broke off"), b=(None, "broke off in the middle"))
    assert "broke off" in driver.updates[0].cause
    assert driver.state.weights.versions.engines == {"a": 0}
    assert standby(driver) == {"b"}


def test_a_fleet_with_inconsistent_weights_waits_for_the_next_refit():
    driver = Driver(config())
    refit(driver, a=(None, "hung"), b=(None, "hung"))
    assert not any(loss.last for loss in driver.lost)
    assert driver.updates[0].cause
    assert not driver.sends
    driver.update()
    assert driver.state.weights.versions.engines == {"a": 1, "b": 1}
    assert len(driver.sends) == 8


def test_a_restarted_engine_has_not_the_version_so_it_waits_for_the_next_one():
    driver = Driver(config())
    driver.update()
    driver.feed(ev.EngineLost(engine="b", cause="killed"))
    driver.come_back("b", version=0)
    assert standby(driver) == {"b"}
    assert not driver.refits
    driver.update()
    assert driver.state.weights.versions.engines == {"a": 2, "b": 2}


def test_it_catches_up_at_once_where_the_version_can_be_published_again():
    driver = Driver(config())
    driver.update(republishable=True)
    driver.feed(ev.EngineLost(engine="b", cause="killed"))
    driver.come_back("b", version=0)
    assert driver.controls == [do.Pause(engine="b", mode="retract")]
    driver.answer_control()
    driver.answer_control()
    assert driver.refits == [of.RefitBegun(version=1, engines=("b",), catch_up=True)]
    driver.answer_refit()
    driver.settle()
    assert driver.state.weights.versions.engines == {"a": 1, "b": 1}


def test_catching_up_that_fails_is_not_tried_again_under_the_same_version():
    driver = Driver(config())
    driver.update(republishable=True)
    driver.feed(ev.EngineLost(engine="b", cause="killed"))
    driver.come_back("b", version=0)
    driver.settle_controls()
    driver.answer_refit(b=(0, "the file is gone"))
    assert standby(driver) == {"b"}
    assert not driver.controls
    assert not driver.refits


def test_an_update_takes_over_an_engine_that_was_about_to_catch_up():
    driver = Driver(config())
    driver.update(republishable=True)
    driver.feed(ev.EngineLost(engine="b", cause="killed"))
    driver.come_back("b", version=0)
    driver.feed(ev.UpdateRequested(version=2))
    driver.settle_controls()
    assert driver.refits == [of.RefitBegun(version=2, engines=("a", "b"))]


def test_an_update_does_not_wait_for_one_that_is_catching_up():
    driver = Driver(config())
    driver.update(republishable=True)
    driver.feed(ev.EngineLost(engine="b", cause="killed"))
    driver.come_back("b", version=0)
    driver.settle_controls()
    driver.feed(ev.UpdateRequested(version=2, republishable=True))
    driver.settle_controls()
    assert [r.engines for r in driver.refits] == [("b",), ("a",)]
    driver.settle()
    assert driver.state.weights.versions.engines == {"a": 2, "b": 2}, "it caught up once more"


def test_one_with_the_fleets_version_takes_part_at_once():
    driver = Driver(config())
    driver.feed(ev.EngineJoined(info=driver.info("c")))
    assert driver.admitted == [of.EngineAdmitted(engine="c", version=0)]
    driver.request_batch()
    assert "c" in driver.state.weights.versions.engines


def test_one_that_joins_while_weights_are_loaded_stands_by():
    driver = Driver(config())
    driver.feed(ev.UpdateRequested(version=1))
    driver.settle_controls()
    driver.feed(ev.EngineJoined(info=driver.info("c")))
    assert standby(driver) == {"c"}
    driver.settle()
    assert driver.state.weights.versions.engines == {"a": 1, "b": 1}


def test_what_a_lost_engine_answers_late_is_not_taken_for_its_next_incarnation():
    driver = Driver(config())
    driver.feed(ev.UpdateRequested(version=1))
    driver.settle_controls()
    driver.feed(ev.EngineLost(engine="b", cause="killed"))
    driver.come_back("b", version=0)
    # Listeners receive no fact either; they would show the new process with these weights.
    for version in (1, None):
        driver.feed(ev.Refitted(engine="b", version=version))
        assert driver.core.facts == []
    driver.feed(ev.Paused(engine="b"))
    assert standby(driver) == {"b"}
    assert not driver.state.fleet.control.standby["b"].inconsistent
    driver.settle()
    assert driver.state.weights.versions.engines == {"a": 1}


def test_an_update_that_is_withdrawn_before_any_weights_are_loaded_changes_nothing():
    driver = Driver(config())
    driver.feed(ev.UpdateRequested(version=1))
    driver.answer_control()
    driver.feed(ev.UpdateWithdrawn(version=1))
    assert "cancelled" in driver.updates[0].cause
    received = [type(fact) for fact in driver.core.facts]
    assert received[:2] == [of.UpdateWithdrawn, of.UpdateFinished]
    driver.settle()
    assert driver.state.weights.versions.trainer == 0
    assert {c.mode for c in driver.state.fleet.control.engines.values()} == {"running"}


def test_an_update_is_not_withdrawn_once_weights_are_loaded():
    driver = Driver(config())
    driver.feed(ev.UpdateRequested(version=1))
    driver.settle_controls()
    driver.feed(ev.UpdateWithdrawn(version=1))
    assert driver.core.facts == [], "a withdrawal that changes nothing makes no fact"
    driver.settle()
    assert driver.updates[0].cause == ""
    assert driver.state.weights.versions.trainer == 1


def test_the_last_engine_is_the_last_only_if_none_stands_by():
    driver = Driver(config())
    refit(driver, b=(0, "no space"))
    driver.feed(ev.EngineLost(engine="a", cause="gone"))
    assert [loss.last for loss in driver.lost] == [False, False]
    driver.feed(ev.EngineLost(engine="b", cause="gone"))
    assert driver.lost[-1].last
