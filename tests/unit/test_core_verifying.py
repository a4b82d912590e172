"""Tests how the core detects an engine with a wrong version, and what it does then."""

from __future__ import annotations

import pytest

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.policies.straggler import BEHAVIOURS, StragglerRule
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.weights import UpdatePhase
from tests.support.driver import Driver, config, names, span


def one_at_a_time(**changes: object) -> Driver:
    return Driver(
        config(batch_groups=1, group_size=1, over_provision=1.0, pace="synchronous", **changes),
        engines=("a",),
        version=3,
    )


def ask_after_a_quiet_time(driver: Driver) -> None:
    driver.auto_verify = False
    driver.now += 30.0
    driver.feed(ev.BatchRequested())


# --- asked before the first request ----------------------------------------------------------


def test_an_engine_is_asked_for_its_version_after_a_quiet_time_and_not_before():
    driver = one_at_a_time()
    driver.auto_verify = False
    driver.request_batch()
    assert not driver.verifications
    driver.finish(driver.attempts()[0])
    driver.now += 30.0
    before = len(driver.sent)
    driver.feed(ev.BatchRequested())
    assert [verify.engine for verify in driver.verifications] == ["a"]
    assert len(driver.sent) == before
    driver.verify()
    assert len(driver.sent) == before + 1


def test_only_as_many_quiet_engines_are_asked_as_there_are_requests_for():
    fleet = tuple("abcdefgh")
    sizes = config(batch_groups=1, group_size=2, over_provision=1.0, pace="synchronous")
    driver = Driver(sizes, engines=fleet, version=3)
    ask_after_a_quiet_time(driver)
    assert len(driver.verifications) == 2
    while driver.verifications:
        driver.verify()
    assert len(driver.sent) == 2
    assert {send.engine for send in driver.sent} < set(fleet)


def test_an_engine_that_failed_the_request_does_not_get_it_again_while_another_is_quiet():
    driver = Driver(
        config(batch_groups=1, group_size=1, over_provision=1.0, pace="synchronous"),
        engines=("a", "b", "c"),
        version=3,
    )
    driver.now += 30.0
    driver.request_batch()
    (attempt,) = driver.attempts()
    failed_on = driver.sent[-1].engine
    driver.fail(attempt)
    assert driver.sent[-1].engine != failed_on


def test_answers_that_take_longer_than_a_quiet_time_are_not_asked_for_again():
    fleet = tuple("abcd")
    sizes = config(batch_groups=2, group_size=4, over_provision=1.0, pace="synchronous")
    driver = Driver(sizes, engines=fleet, version=3)
    ask_after_a_quiet_time(driver)
    asked = 0
    while driver.verifications and asked < 100:
        driver.now += 0.7
        driver.verify()
        asked += 1
    assert asked == len(fleet)
    assert len(driver.sent) == 8
    driver.finish_each(driver.attempts())
    driver.now += 30.0
    driver.feed(ev.BatchRequested())
    assert len(driver.verifications) == len(fleet)


def test_an_engine_that_was_restarted_in_a_quiet_time_gets_nothing_and_stands_by():
    driver = one_at_a_time()
    driver.request_batch()
    driver.finish(driver.attempts()[0])
    ask_after_a_quiet_time(driver)
    driver.verify(0)
    assert list(driver.state.fleet.control.standby) == ["a"]
    assert [lost.standby for lost in driver.lost] == [True]
    assert "version 0" in driver.lost[0].cause
    assert not driver.attempts()


@pytest.mark.parametrize("republishable", [True, False])
def test_it_is_brought_up_at_once_where_the_version_can_be_published_again(republishable: bool):
    driver = one_at_a_time()
    driver.update(republishable=republishable)
    driver.request_batch()
    driver.finish(driver.attempts()[0])
    ask_after_a_quiet_time(driver)
    driver.verify(0)
    driver.settle()
    assert bool(driver.attempts()) is republishable


def test_an_engine_is_asked_after_a_connection_to_it_broke():
    driver = Driver(config(batch_groups=2, group_size=1, over_provision=1.0), engines=("a",))
    driver.request_batch()
    driver.auto_verify = False
    driver.fail(driver.attempts()[0])
    assert [verify.engine for verify in driver.verifications] == ["a"]
    before = len(driver.sent)
    driver.verify()
    assert len(driver.sent) == before + 1


def test_a_request_that_the_engine_refuses_says_nothing_of_its_version():
    driver = Driver(config(batch_groups=2, group_size=1, over_provision=1.0), engines=("a", "b"))
    driver.request_batch()
    driver.auto_verify = False
    driver.fail(driver.attempts()[0], final=True)
    assert not driver.verifications


def test_an_engine_with_inconsistent_weights_is_on_standby():
    driver = one_at_a_time()
    ask_after_a_quiet_time(driver)
    driver.verify(None)
    assert driver.state.fleet.control.standby["a"].inconsistent


def test_a_pause_waits_for_the_answer():
    driver = one_at_a_time()
    ask_after_a_quiet_time(driver)
    commands = driver.feed(ev.UpdateRequested(version=4))
    assert "Pause" not in names(commands)
    commands = driver.feed(ev.Verified(engine="a", version=3))
    assert "Pause" in names(commands)


# --- shown by tokens -------------------------------------------------------------------------


def test_a_label_of_an_older_version_counts_the_tokens_under_it():
    driver = one_at_a_time()
    driver.request_batch()
    (key,) = driver.attempts()
    driver.progress(key, 5, label=1)
    assert list(driver.state.fleet.control.standby) == ["a"]
    (rollout,) = driver.state.in_flight.rollouts.values()
    assert rollout.log.versions().tolist() == [1] * 5
    assert rollout.log.exact


def test_a_label_alone_brings_the_only_engine_up_again():
    """No later event of the engine would start the refit."""
    driver = one_at_a_time()
    driver.update(republishable=True)
    driver.request_batch()
    (key,) = driver.attempts()
    driver.progress(key, 5, label=0)
    assert not driver.attempts()
    driver.settle()
    assert list(driver.state.fleet.control.engines) == ["a"]
    assert driver.attempts()


def test_an_engine_that_stands_by_before_the_update_is_waited_for_in_it():
    """Otherwise the update ends as failed while the weights are being loaded."""
    driver = one_at_a_time()
    driver.evaluate()
    (key,) = driver.attempts()
    driver.feed(ev.UpdateRequested(version=4))
    driver.progress(key, 2, label=0)
    assert list(driver.state.fleet.control.standby) == ["a"]
    driver.feed(ev.EvaluationWithdrawn(evaluation_id=1))
    driver.settle_controls()
    assert driver.refits
    assert not driver.updates
    driver.answer_refit()
    assert [update.cause for update in driver.updates] == [""]
    assert list(driver.state.fleet.control.engines) == ["a"]


def test_a_label_of_a_newer_version_leaves_open_which_tokens_it_is_of():
    driver = one_at_a_time()
    driver.request_batch()
    (key,) = driver.attempts()
    driver.progress(key, 5, label=3)
    driver.progress(key, 5, label=4)
    (rollout,) = driver.state.in_flight.rollouts.values()
    assert rollout.log.versions().tolist() == [3] * 5 + [4] * 5
    assert not rollout.log.exact


def test_labels_that_the_request_may_have_seen_are_not_held_against_the_engine():
    driver = Driver(
        config(batch_groups=1, group_size=1, over_provision=1.0, pace="asynchronous"),
        engines=("a",),
        version=3,
    )
    driver.request_batch()
    (key, *_) = driver.attempts()
    driver.progress(key, 2, label=3)
    driver.update()
    driver.progress(key, 2, label=3)  # written before the refit, and read after it
    driver.progress(key, 2, label=4)
    assert list(driver.state.fleet.control.engines) == ["a"]
    assert not driver.lost


def test_spans_that_contradict_are_recorded_and_the_engine_stands_by():
    driver = one_at_a_time()
    driver.request_batch()
    driver.finish(driver.attempts()[0], 4, spans=(span(0, 4),))
    assert [lost.standby for lost in driver.lost] == [True]
    (batch,) = driver.batches
    (rollout,) = batch.rollouts
    assert rollout.versions.tolist() == [0] * 4
    assert rollout.versions_exact


def test_a_newer_version_than_the_trainers_is_not_a_negative_staleness():
    driver = one_at_a_time()
    driver.request_batch()
    driver.finish(driver.attempts()[0], 4, spans=(span(7, 4),))
    assert "version 7" in driver.lost[0].cause
    (rollout,) = driver.batches[0].rollouts
    assert rollout.staleness(driver.batches[0].version) == 0


def test_the_spans_of_an_interrupted_attempt_count_as_well():
    driver = one_at_a_time(straggler="abort")
    driver.request_batch()
    (key,) = driver.attempts()
    driver.progress(key, 4)
    driver.interrupt(key, spans=(span(1, 4),))
    assert list(driver.state.fleet.control.standby) == ["a"]
    (rollout,) = driver.state.in_flight.rollouts.values()
    assert rollout.log.versions().tolist() == [1] * 4


def test_the_label_of_the_base_model_is_right_under_an_adapter():
    driver = one_at_a_time()
    driver.update(adapter=True)
    driver.request_batch()
    (key,) = driver.attempts()
    driver.progress(key, 2, label=3)
    driver.finish(key, 2, spans=(span(3, 4),))
    assert not driver.lost
    assert driver.batches[0].version == 4


def test_an_adapter_is_not_loaded_into_an_engine_that_was_restarted_with_another_base():
    driver = one_at_a_time()
    driver.update(adapter=True)
    driver.request_batch()
    (key,) = driver.attempts()
    driver.progress(key, 2, label=0)
    driver.settle()
    commands = driver.feed(ev.UpdateRequested(version=5, adapter=True))
    assert not any(isinstance(command, facts.RefitBegun) for command in commands)


# --- evaluations -----------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [True, False])
def test_a_group_of_an_evaluation_with_other_tokens_is_generated_again(ends: bool):
    driver = Driver(
        config(batch_groups=1, group_size=1, pace="synchronous"), engines=("a", "b"), version=3
    )
    driver.evaluate(2)
    first, second = driver.attempts()
    if ends:
        driver.finish(first, 4, spans=(span(0, 4),))
    else:
        driver.progress(first, 4, label=0)
    assert driver.state.in_flight.ledger.rollouts[Reason.OTHER_VERSION] == 1
    assert driver.state.in_flight.ledger.tokens[Reason.OTHER_VERSION] == 4
    while driver.attempts():
        key = driver.attempts()[0]
        driver.finish(key, 4, spans=(span(3, 4),))
    batch = driver.evaluations[1]
    assert [group.prompt.input_ids[0] for group in batch.groups] == [0, 1]
    assert {int(v) for rollout in batch.rollouts for v in rollout.versions} == {3}
    assert second not in driver.sends


@pytest.mark.parametrize("straggler", list(BEHAVIOURS))
def test_an_evaluation_requested_in_an_update_starts_after_it(straggler: StragglerRule):
    driver = Driver(
        config(batch_groups=2, group_size=2, straggler=straggler, pace="asynchronous"),
        engines=("a", "b"),
    )
    driver.request_batch()
    driver.feed(ev.UpdateRequested(version=1))
    if not BEHAVIOURS[straggler].waits_inside:
        for key in driver.attempts():  # the update starts once no request runs
            driver.interrupt(key)
    assert driver.state.weights.update is not None
    assert driver.state.weights.update.phase is not UpdatePhase.WAITING
    driver.evaluate(3, group_size=2)
    assert not driver.state.evaluations.running
    driver.settle()
    assert driver.state.weights.versions.trainer == 1
    evaluated = {group.group_id for group in driver.state.evaluations.running[1]}
    for key, send in list(driver.sends.items()):
        if send.group_id in evaluated:
            driver.finish(key, 2, spans=(span(1, 2),))
    assert driver.evaluations[1].version == 1


def test_it_begins_too_when_the_update_is_withdrawn():
    driver = Driver(config(batch_groups=2, group_size=2, pace="asynchronous"), engines=("a", "b"))
    driver.request_batch()
    driver.feed(ev.UpdateRequested(version=1))
    driver.evaluate(group_size=2)
    driver.feed(ev.UpdateWithdrawn(version=1))
    assert len(driver.state.evaluations.running[1]) == 1
