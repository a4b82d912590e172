"""Tests fleets that calls of the trainer hold, and groups that are no longer wanted."""

from __future__ import annotations

import pytest

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.state.engine_control import Mode
from aprilsched.kernel.core.state.ledger import Reason
from tests.support.driver import Driver, config, names


def modes(driver: Driver) -> set[Mode]:
    return {control.mode for control in driver.state.fleet.control.engines.values()}


def hold(driver: Driver) -> None:
    driver.feed(ev.HoldChanged(held=True))
    driver.settle()


def test_a_hold_pauses_with_the_requests_inside_and_its_end_continues():
    driver = Driver(config(), engines=("a",))
    assert names(driver.feed(ev.HoldChanged(held=True))) == ["Pause"]
    assert names(driver.feed(ev.Paused(engine="a"))) == []
    assert len(driver.sends) == 8, "the requests stay inside"
    assert driver.feed(ev.HoldChanged(held=True)) == [], "a second hold changes nothing"
    assert names(driver.feed(ev.HoldChanged(held=False))) == ["Continue"]


def test_nothing_is_sent_during_a_hold():
    driver = Driver(config(), engines=("a",))
    hold(driver)
    sent = len(driver.sent)
    driver.finish(driver.attempts()[0], 3)
    driver.finish(driver.attempts()[0], 3)
    assert len(driver.sent) == sent
    driver.feed(ev.HoldChanged(held=False))
    driver.settle()
    driver.request_batch()
    assert modes(driver) == {Mode.RUNNING}


def test_an_update_in_a_hold_is_carried_out_and_the_engines_stay_paused():
    driver = Driver(config())
    hold(driver)
    driver.update()
    assert driver.state.weights.versions.trainer == 1
    assert modes(driver) == {Mode.PAUSED}
    driver.feed(ev.HoldChanged(held=False))
    driver.settle()
    assert modes(driver) == {Mode.RUNNING}


def test_a_hold_during_an_update_lasts_beyond_it():
    driver = Driver(config())
    driver.feed(ev.UpdateRequested(version=1))
    driver.feed(ev.HoldChanged(held=True))
    driver.settle()
    assert (driver.state.weights.versions.trainer, modes(driver)) == (1, {Mode.PAUSED})


def test_a_withdrawn_group_is_aborted_and_is_in_the_ledger_with_its_tokens():
    driver = Driver(config(), engines=("a",))
    driver.progress(driver.attempts()[0], 5)
    group = next(iter(driver.state.in_flight.groups))
    driver.feed(ev.GroupWithdrawn(group_id=group, cause="the client has disconnected"))
    assert group not in driver.state.in_flight.groups
    assert len(driver.aborts) == 2
    ledger = driver.state.in_flight.ledger
    assert ledger.rollouts == {Reason.WITHDRAWN: 2}
    assert ledger.tokens[Reason.WITHDRAWN] == 5
    assert {entry.cause for entry in ledger.entries} == {"the client has disconnected"}
    assert driver.state.prompts.consecutive_failures == 0, "a withdrawal is not a failure"


@pytest.mark.parametrize("left", ["delivered", "offered", "evaluation"])
def test_a_group_that_has_left_flight_or_belongs_to_others_is_not_withdrawn(left: str):
    driver = Driver(config(), engines=("a",), takes=left == "delivered")
    if left == "evaluation":
        driver.evaluate()
        (group,) = driver.state.evaluations.running[1]
        group_id = group.group_id
    else:
        group_id = next(iter(driver.state.in_flight.groups))
        driver.request_batch()
        driver.finish_groups(driver.group_ids())
    driver.feed(ev.GroupWithdrawn(group_id=group_id, cause="too late"))
    assert not driver.state.in_flight.ledger.total
