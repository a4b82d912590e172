"""Tests a fleet without an engine in use: nothing in flight is lost, nothing waits forever."""

from __future__ import annotations

from aprilsched.config import Health
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.steps.outage import stranded
from tests.support.driver import Driver, config, names


def tick(driver: Driver, seconds: float) -> list[do.Command]:
    """Time passes."""
    commands: list[do.Command] = []
    end = driver.now + seconds
    while driver.now < end:
        driver.now += 0.999
        commands += driver.feed(ev.Tick())
    return commands


def lose_all(driver: Driver, cause: str = "burnt") -> list[do.Command]:
    commands: list[do.Command] = []
    for engine in list(driver.state.fleet.control.engines):
        commands += driver.feed(ev.EngineLost(engine=engine, cause=cause))
    return commands


def evaluate(driver: Driver) -> None:
    driver.evaluate(3, evaluation_id=7)


# --- no engine is there --------------------------------------------------------------------------


def test_the_wait_is_said_with_every_cause_then_each_minute_and_has_an_end():
    driver = Driver(config(health=Health(fleet_wait_s=200)))
    commands = lose_all(driver)
    assert commands[-1] == facts.FleetAwaited(
        lost=(("a", "burnt"), ("b", "burnt")), waited_s=0.0, left_s=200.0
    )
    commands = tick(driver, 199)
    assert [round(c.left_s) for c in commands if isinstance(c, facts.FleetAwaited)] == [140, 80, 20]
    (given_up,) = tick(driver, 5)
    assert isinstance(given_up, facts.FleetGivenUp)
    assert given_up.waited_s >= 200
    assert not tick(driver, 500), "FleetGivenUp is reported once"


def test_an_engine_that_returns_in_time_continues():
    driver = Driver(config())
    driver.progress_each(driver.attempts(), 4)
    lose_all(driver)
    tick(driver, 300)
    assert not driver.sends
    driver.come_back("b")
    assert {send.engine for send in driver.sends.values()} == {"b"}
    assert {len(send.input_ids) for send in driver.sends.values()} == {2 + 4}
    assert driver.state.fleet.outage is None
    assert not tick(driver, 30)
    lose_all(driver)
    assert not any(isinstance(c, facts.FleetGivenUp) for c in tick(driver, 500)), (
        "a wait of its own"
    )


def test_an_update_in_an_outage_waits_for_the_engine_that_comes_back():
    driver = Driver(config())
    lose_all(driver)
    driver.feed(ev.UpdateRequested(version=1))
    tick(driver, 100)
    assert not driver.updates
    driver.come_back("a")
    driver.settle()
    assert [u.cause for u in driver.updates] == [""]
    assert driver.state.weights.versions.engines == {"a": 1}
    assert len(driver.sends) == 8


def test_an_update_in_an_outage_reaches_an_engine_that_came_back_empty():
    driver = Driver(config())
    driver.update()
    lose_all(driver)
    driver.feed(ev.UpdateRequested(version=2))
    driver.come_back("a", version=0)
    driver.settle()
    assert driver.state.weights.versions.engines == {"a": 2}
    assert driver.sends


def test_an_update_in_an_outage_can_be_withdrawn():
    driver = Driver(config())
    lose_all(driver)
    driver.feed(ev.UpdateRequested(version=1))
    driver.feed(ev.UpdateWithdrawn(version=1))
    assert "cancelled" in driver.updates[0].cause


def test_an_adapter_in_an_outage_waits_too():
    driver = Driver(config())
    lose_all(driver)
    driver.feed(ev.UpdateRequested(version=1, adapter=True))
    tick(driver, 20)
    assert not driver.updates
    driver.come_back("a")
    driver.settle()
    assert driver.state.weights.adapters == {"a": {1}}


def test_sleep_in_an_outage_ends_and_the_next_engine_works():
    driver = Driver(config())
    lose_all(driver)
    driver.feed(ev.SleepRequested(tags=("kv_cache", "weights")))
    driver.feed(ev.WakeRequested())
    assert names(driver.sleeps)[-1] == "SleepEnded"
    driver.come_back("a")
    assert driver.sends


def test_an_update_waits_for_the_only_engine_which_is_catching_up():
    driver = Driver(config())
    driver.update(republishable=True)
    lose_all(driver)
    driver.come_back("a", version=0)
    driver.settle_controls()
    assert driver.refits[0].catch_up
    driver.feed(ev.UpdateRequested(version=2))
    assert len(driver.updates) == 1
    driver.settle()
    assert [update.cause for update in driver.updates] == ["", ""]
    assert driver.state.weights.versions.engines == {"a": 2}


# --- an engine is there, without the fleet's weights ---------------------------------------------


def without_weights(driver: Driver) -> None:
    """Every engine is lost, and one comes back with the first version."""
    driver.update()
    lose_all(driver)
    driver.come_back("a", version=0)


def test_who_waits_for_a_batch_is_told_to_update_after_a_time_in_which_another_may_come():
    driver = Driver(config())
    driver.request_batch()
    without_weights(driver)
    assert "UpdateWanted" not in names(tick(driver, 8))
    assert not stranded(driver.state)
    (want,) = tick(driver, 4)
    assert want == facts.UpdateWanted(engines=("a",), version=1, batch=True, evaluations=())
    assert stranded(driver.state)
    assert not tick(driver, 100), "UpdateWanted is reported once"
    assert "UpdateWanted" in names(driver.feed(ev.BatchRequested())), "and to a new request"
    driver.update()
    driver.request_batch()
    assert len(driver.sends) == 8


def test_another_engine_that_has_the_version_is_worth_the_wait():
    driver = Driver(config())
    driver.request_batch()
    without_weights(driver)
    tick(driver, 5)
    driver.come_back("b", version=1)
    assert "UpdateWanted" not in names(tick(driver, 50))
    assert {send.engine for send in driver.sends.values()} == {"b"}


def test_no_update_is_wanted_while_an_engine_catches_up():
    driver = Driver(config())
    driver.request_batch()
    driver.update(republishable=True)
    lose_all(driver)
    driver.come_back("a", version=0)
    assert "UpdateWanted" not in names(tick(driver, 100))
    driver.settle()
    assert driver.state.weights.versions.engines == {"a": 1}
    assert driver.sends


def test_no_update_is_wanted_while_no_call_waits():
    driver = Driver(config())
    without_weights(driver)
    assert "UpdateWanted" not in names(tick(driver, 100))


def test_an_evaluation_is_abandoned_where_only_an_update_leads_on():
    driver = Driver(config())
    driver.update()
    evaluate(driver)
    driver.progress_each(driver.attempts(), 2)
    lose_all(driver)
    driver.come_back("a", version=0)
    commands = tick(driver, 12)
    assert facts.UpdateWanted(engines=("a",), version=1, batch=False, evaluations=(7,)) in commands
    ledger = driver.state.in_flight.ledger
    assert ledger.rollouts == {Reason.ABANDONED: 3}
    assert not driver.given_up
    driver.update()
    assert 7 not in driver.evaluations


def test_an_update_does_not_await_an_evaluation_without_engines():
    driver = Driver(config())
    driver.update()
    evaluate(driver)
    lose_all(driver)
    driver.feed(ev.UpdateRequested(version=2))
    driver.come_back("a", version=0)
    tick(driver, 12)
    driver.settle()
    assert driver.state.weights.versions.engines == {"a": 2}
    assert driver.state.in_flight.ledger.rollouts == {Reason.ABANDONED: 3}


def test_an_evaluation_continues_on_a_returned_engine():
    driver = Driver(config())
    evaluate(driver)
    lose_all(driver)
    driver.feed(ev.UpdateRequested(version=1))
    driver.come_back("a")
    tick(driver, 50)
    assert not driver.updates
    while driver.sends:
        driver.finish(driver.attempts()[0])
    assert len(list(driver.evaluations[7].rollouts)) == 3
    driver.settle()
    assert driver.state.weights.versions.engines == {"a": 1}
