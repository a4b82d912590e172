"""Tests adapters in the core: no pause for loading, and unloading after the last request."""

from __future__ import annotations

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from tests.support.driver import Driver, config, span


def test_an_adapter_is_loaded_without_a_pause_and_serves_what_is_sent_afterwards():
    driver = Driver(config())
    before = driver.attempts()
    driver.feed(ev.UpdateRequested(version=1, adapter=True))
    assert driver.refits == [facts.RefitBegun(version=1, engines=("a", "b"), adapter=True)]
    assert not driver.controls
    driver.settle()
    assert {send.adapter for send in driver.sends.values()} == {None}
    driver.request_batch()
    driver.finish_each(before)
    assert {send.adapter for send in driver.sent[len(before) :]} == {1}


def test_tokens_have_the_version_of_their_requests_adapter():
    driver = Driver(config(batch_groups=1, group_size=2, over_provision=1.0))
    driver.update(adapter=True)
    driver.request_batch()
    base = driver.attempts()
    driver.finish_each(base)
    (first, second) = driver.attempts()
    driver.progress(first, 5)
    driver.update(adapter=True)
    label = (span(0, 8),)
    driver.finish(first, 3, spans=label)
    driver.finish(second, 8, spans=label)
    driver.request_batch()
    assert [r.versions.tolist() for r in driver.batches[0].rollouts] == [[0] * 3] * 2
    assert [r.versions.tolist() for r in driver.batches[1].rollouts] == [[1] * 8] * 2
    assert all(r.versions_exact for r in driver.batches[1].rollouts)


def test_a_continuation_uses_the_new_adapter():
    driver = Driver(config(batch_groups=1, group_size=1, over_provision=1.0))
    driver.update(adapter=True)
    driver.request_batch()
    driver.finish(driver.attempts()[0])
    (key,) = driver.attempts()
    driver.progress(key, 4)
    driver.update(adapter=True)
    driver.fail(key)
    (key,) = driver.attempts()
    assert driver.sends[key].adapter == 2
    driver.finish(key, 2)
    driver.request_batch()
    (rollout,) = driver.batches[-1].rollouts
    assert rollout.versions.tolist() == [1] * 4 + [2] * 2


def test_an_adapter_is_unloaded_when_its_last_request_has_ended_and_not_before():
    driver = Driver(config(batch_groups=1, group_size=2, over_provision=1.0), engines=("a",))
    driver.update(adapter=True)
    driver.request_batch()
    driver.finish_each(driver.attempts())
    (first, second) = driver.attempts()
    driver.update(adapter=True)
    driver.finish(first)
    assert not driver.retired
    driver.finish(second)
    assert driver.retired == [facts.AdapterRetired(engine="a", version=1)]


def test_an_adapter_that_fails_everywhere_changes_nothing():
    driver = Driver(config())
    driver.feed(ev.UpdateRequested(version=1, adapter=True))
    driver.answer_refit(a=(0, "no such file"), b=(0, "no such file"))
    assert "no such file" in driver.updates[0].cause
    assert (driver.state.weights.adapter, driver.state.weights.versions.trainer) == (None, 0)
    assert not driver.lost


def test_a_restarted_engine_gets_the_adapter_in_use():
    driver = Driver(config())
    driver.update(adapter=True, republishable=True)
    driver.feed(ev.EngineLost(engine="b", cause="killed"))
    driver.come_back("b", version=0)
    assert driver.refits == [
        facts.RefitBegun(version=1, engines=("b",), adapter=True, catch_up=True)
    ]
    driver.settle()
    assert driver.state.weights.versions.engines == {"a": 1, "b": 1}


def test_a_lost_engine_takes_its_adapters_with_it():
    driver = Driver(config(batch_groups=1, group_size=2, over_provision=1.0), engines=("a", "b"))
    driver.update(adapter=True)
    driver.update(adapter=True)
    driver.retired.clear()
    driver.feed(ev.EngineLost(engine="b", cause="killed"))
    driver.update(adapter=True)
    driver.settle()
    assert {retired.engine for retired in driver.retired} <= {"a"}
    assert set(driver.state.weights.adapters) == {"a"}


def test_an_engine_that_comes_into_use_with_the_first_adapter_takes_the_next_one_too():
    driver = Driver(config())
    driver.feed(ev.EngineLost(engine="a", cause="gone"))
    driver.feed(ev.UpdateRequested(version=1, adapter=True))
    driver.come_back("a")
    driver.answer_refit(b=(0, "broken"))
    assert set(driver.state.fleet.control.standby) == {"a"}
    for version in (1, 2):
        driver.update(adapter=True)
        assert driver.state.weights.versions.engines == {"a": version, "b": version}


def test_one_with_another_base_model_does_not():
    driver = Driver(config())
    driver.update()
    driver.update(adapter=True, republishable=True)
    driver.feed(ev.EngineLost(engine="b", cause="killed"))
    driver.come_back("b", version=0)
    assert not driver.refits
    driver.update(adapter=True)
    assert driver.state.weights.versions.engines == {"a": 3}


def test_a_batch_that_waits_for_an_adapter_is_offered_with_the_last_answer():
    """After the last answer no other event comes, so the batch must be offered with this one."""
    driver = Driver(config(batch_groups=1, group_size=1, over_provision=1.0), engines=("a",))
    driver.request_batch()
    driver.feed(ev.UpdateRequested(version=1, adapter=True))
    driver.finish(driver.attempts()[0])
    assert not driver.offers
    driver.answer_refit()
    assert driver.offers


def test_an_evaluation_starts_once_every_engine_has_the_adapter():
    driver = Driver(config(), engines=("a",), supply=0)
    driver.feed(ev.UpdateRequested(version=1, adapter=True))
    driver.evaluate(start=900)
    assert not driver.attempts()
    driver.answer_refit()
    assert len(driver.attempts()) == 1
