"""Tests how the core follows a version that another client has loaded into the engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aprilsched.config import Health, Timeouts
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.ledger import Reason
from tests.support.driver import Driver, Key, config, span


def loaded(driver: Driver, version: int = 1, *, labelled: bool = True) -> list[do.Command]:
    """Let the trainer report that it has loaded `version`; no engine has answered yet."""
    return driver.feed(ev.UpdateRequested(version=version, external=True, labelled=labelled))


def met(**changes: object) -> tuple[Driver, Key]:
    """A driver whose first request has three tokens of version 0 and two of version 1."""
    driver = Driver(config(batch_groups=1, group_size=1, **changes), engines=("a",))
    driver.request_batch()
    key = driver.attempts()[0]
    driver.progress(key, 3)
    loaded(driver)
    driver.answer_refit()
    driver.progress(key, 2, label=1)
    return driver, key


def test_nothing_is_paused_and_every_engine_is_asked():
    driver = Driver(config(), engines=("a", "b"))
    driver.request_batch()
    sent = len(driver.attempts())
    commands = loaded(driver)
    assert commands == [facts.RefitBegun(version=1, engines=("a", "b"), external=True)]
    driver.answer_refit()
    assert not driver.controls
    assert driver.state.weights.versions.engines == {"a": 1, "b": 1}
    assert driver.updates == [facts.UpdateFinished(version=1, failed=(), cause="")]
    assert len(driver.attempts()) == sent


def test_requests_in_flight_are_known_by_the_spans_of_the_engine():
    driver, key = met()
    driver.finish(key, 0, spans=(span(0, 3), span(1, 5, 3)))
    (rollout,) = driver.batches[0].rollouts
    assert rollout.versions.tolist() == [0, 0, 0, 1, 1]
    assert rollout.versions_exact


def test_without_spans_they_are_not_exact():
    driver, key = met(allow_inexact_versions=True)
    driver.finish(key, 0)
    assert not next(driver.batches[0].rollouts).versions_exact


def test_one_that_ends_before_the_engines_have_answered_is_not_exact_either():
    driver = Driver(config(batch_groups=1, group_size=1), engines=("a",))
    driver.request_batch()
    key = driver.attempts()[0]
    driver.progress(key, 3)
    loaded(driver)
    driver.finish(key, 2)
    driver.answer_refit()
    assert not next(driver.batches[0].rollouts).versions_exact


def test_labels_that_came_after_the_load_leave_the_requests_in_flight_inexact():
    driver = Driver(config(batch_groups=1, group_size=1), engines=("a",))
    driver.request_batch()
    key = driver.attempts()[0]
    driver.progress(key, 3)
    loaded(driver, labelled=False)
    driver.answer_refit()
    driver.finish(key, 2, spans=(span(0, 4), span(1, 5, 4)))
    (rollout,) = driver.batches[0].rollouts
    assert rollout.versions.tolist() == [0, 0, 0, 0, 1]
    assert not rollout.versions_exact


@pytest.mark.parametrize(("kv", "stale"), [("recompute", False), ("keep", True), ("apart", True)])
def test_the_setting_says_whether_the_cache_was_flushed(kv: str, stale: bool):
    straggler = "retract" if kv == "recompute" else "in_place"
    driver, key = met(straggler=straggler, kv_after_refit=kv)
    driver.finish(key, 0, spans=(span(0, 3), span(1, 5, 3)))
    assert next(driver.batches[0].rollouts).stale_keys is stale


def test_an_engine_left_out_is_on_standby_until_the_next_update():
    driver = Driver(config(), engines=("a", "b"))
    driver.request_batch()
    loaded(driver)
    driver.answer_refit(b=(0, "names its weights 0 and not 1"))
    assert driver.state.weights.versions.engines == {"a": 1}
    assert list(driver.state.fleet.control.standby) == ["b"]
    assert not driver.state.fleet.control.standby["b"].inconsistent
    loaded(driver, version=2)
    driver.answer_refit()
    assert driver.state.weights.versions.engines == {"a": 2, "b": 2}


def test_where_no_engine_has_it_the_old_version_stays_in_use():
    driver = Driver(config(), engines=("a", "b"))
    driver.request_batch()
    loaded(driver)
    driver.answer_refit(a=(0, "names it 0"), b=(0, "names it 0"))
    assert driver.state.weights.versions.engines == {"a": 0, "b": 0}
    assert "names it 0" in driver.updates[0].cause


def test_engines_that_its_labels_had_put_on_standby_come_into_use():
    driver = Driver(config(), engines=("a", "b"))
    driver.request_batch()
    for engine in ("a", "b"):
        key = driver.on(engine)[0]
        driver.progress(key, 1, label=1)
    assert set(driver.state.fleet.control.standby) == {"a", "b"}
    loaded(driver)
    driver.settle()
    assert driver.state.weights.versions.engines == {"a": 1, "b": 1}
    assert driver.attempts()


def test_an_engine_that_is_lost_before_it_answers_is_not_waited_for():
    driver = Driver(config(), engines=("a", "b"))
    driver.request_batch()
    loaded(driver)
    driver.feed(ev.EngineLost(engine="b", cause="its machine burnt"))
    refit = driver.refits.pop()
    driver.feed(ev.Refitted(engine="a", version=refit.version, cause=""))
    assert driver.state.weights.versions.engines == {"a": 1}
    assert driver.state.weights.update is None


def test_an_engine_that_is_being_asked_for_its_version_answers_first():
    driver = Driver(config(batch_groups=1, group_size=1, pace="synchronous"), engines=("a",))
    driver.auto_verify = False
    driver.now += 30.0
    driver.feed(ev.BatchRequested())
    assert driver.verifications
    assert not any(isinstance(command, facts.RefitBegun) for command in loaded(driver))
    driver.verify(1)  # it has the new version already, and does not stand by for it
    assert not driver.lost
    driver.answer_refit()
    assert driver.state.weights.versions.engines == {"a": 1}


@pytest.mark.parametrize("ended", [True, False])
def test_an_evaluation_that_it_met_is_generated_again(ended: bool):
    driver = Driver(config(batch_groups=1, group_size=1, pace="synchronous"), engines=("a", "b"))
    driver.evaluate(2)
    first, second = driver.attempts()
    driver.finish(first, 3, spans=(span(0, 3),))
    loaded(driver)
    if ended:
        driver.finish(second, 3, spans=(span(0, 1), span(1, 3, 1)))
    assert not driver.evaluations
    driver.settle()
    assert driver.state.in_flight.ledger.rollouts[Reason.OTHER_VERSION] == 2
    driver.finish_each([key for key in driver.attempts() if key != second], 4, spans=(span(1, 4),))
    batch = driver.evaluations[1]
    assert batch.version == 1
    assert {int(v) for rollout in batch.rollouts for v in rollout.versions} == {1}


def test_an_engine_that_says_that_it_kept_the_old_version_leaves_no_doubt_about_its_tokens():
    driver = Driver(config(batch_groups=1, group_size=1), engines=("a", "b"))
    driver.request_batch()
    loaded(driver)
    key = driver.on("b")[0]
    driver.progress(key, 3, label=0)
    driver.answer_refit(b=(0, "names its weights 0 and not 1"))
    (again,) = [other for other in driver.attempts() if other[0] == key[0]]
    assert driver.sends[again].engine == "a"
    driver.finish(again, 2)
    (rollout,) = driver.batches[0].rollouts
    assert rollout.versions.tolist() == [0, 0, 0, 1, 1]
    assert rollout.versions_exact


# --- versions that are followed ------------------------------------------------------------------


def following(*engines: str, **changes: object) -> Driver:
    driver = Driver(config(follow_weights=True, **changes), engines=engines or ("a", "b"))
    driver.request_batch()
    return driver


def refit_to(driver: Driver, version: int) -> None:
    (refit,) = driver.refits
    assert (refit.version, refit.external, refit.followed) == (version, True, True)


def by_label(driver: Driver) -> None:
    driver.progress(driver.on("a")[0], 2, label=4)


def by_spans(driver: Driver) -> None:
    driver.finish(driver.on("a")[0], 2, spans=(span(0, 1), span(4, 2, 1)))


def by_watch(driver: Driver) -> None:
    driver.feed(ev.VersionSeen(engine="a", version=4))


def by_answer(driver: Driver) -> None:
    driver.auto_verify = False
    driver.fail(driver.on("a")[0])
    driver.verify(4)


@pytest.mark.parametrize("shows", [by_label, by_spans, by_watch, by_answer])
def test_the_fleet_follows_however_the_version_shows(shows: Callable[[Driver], None]):
    driver = following(straggler="abort")
    shows(driver)
    assert not driver.lost
    refit_to(driver, 4)
    driver.answer_refit()
    assert driver.state.weights.versions.engines == {"a": 4, "b": 4}
    assert not driver.controls
    assert driver.state.in_flight.ledger.total == 0


def test_without_the_setting_the_engine_stands_by():
    driver = Driver(config(), engines=("a", "b"))
    driver.request_batch()
    by_watch(driver)
    by_label(driver)
    assert list(driver.state.fleet.control.standby) == ["a"]


def test_a_label_leaves_the_tokens_to_the_spans():
    driver = following("a", batch_groups=1, group_size=1)
    key = driver.attempts()[0]
    driver.progress(key, 3)
    driver.progress(key, 2, label=4)
    driver.answer_refit()
    driver.finish(key, 1, spans=(span(0, 4), span(4, 6, 4)))
    (rollout,) = driver.batches[0].rollouts
    assert rollout.versions.tolist() == [0] * 4 + [4] * 2
    assert rollout.versions_exact


@pytest.mark.parametrize("straggler", ["retract", "in_place"])
def test_a_scheduler_that_pauses_at_each_batch_would_end_the_pauses_of_others(straggler: str):
    with pytest.raises(ConfigError, match=r'straggler="abort" or "run"\.'):
        config(follow_weights=True, pace="synchronous", straggler=straggler)


def test_an_older_version_is_not_followed():
    driver = Driver(config(follow_weights=True), engines=("a", "b"), version=3)
    driver.request_batch()
    driver.feed(ev.VersionSeen(engine="a", version=2))
    driver.progress(driver.on("a")[0], 2, label=2)
    assert list(driver.state.fleet.control.standby) == ["a"]
    assert not driver.refits


def test_one_of_two_leads_and_the_other_comes_into_use_when_it_has_moved_too():
    driver = following()
    by_label(driver)
    driver.answer_refit(b=(0, ""))
    assert driver.state.weights.versions.engines == {"a": 4}
    assert list(driver.state.fleet.control.standby) == ["b"]
    driver.feed(ev.VersionSeen(engine="b", version=0))
    assert list(driver.state.fleet.control.standby) == ["b"]
    driver.feed(ev.VersionSeen(engine="b", version=4))
    assert driver.state.weights.versions.engines == {"a": 4, "b": 4}


def test_one_of_three_does_not_lead_and_is_not_followed_later_either():
    driver = following("a", "b", "c")
    by_label(driver)
    driver.answer_refit(b=(0, ""), c=(0, ""))
    assert driver.state.weights.versions.engines == {"b": 0, "c": 0}
    (lost,) = driver.lost
    assert lost.standby
    assert lost.cause == (
        "1 of 3 engines have version 4 where the fleet has 0, so it was loaded by mistake"
    )
    driver.feed(ev.VersionSeen(engine="a", version=4))
    assert not driver.refits
    driver.feed(ev.VersionSeen(engine="b", version=4))  # the others were only slow
    driver.answer_refit(c=(0, ""))
    assert driver.state.weights.versions.engines == {"a": 4, "b": 4}


def test_an_engine_that_joins_during_a_refit_is_on_standby():
    driver = following("a", "b")
    driver.feed(ev.EngineLost(engine="b", cause="restarted"))
    driver.feed(ev.VersionSeen(engine="a", version=4))
    driver.come_back("b")
    driver.answer_refit(a=(2, "names its weights 2"))
    assert driver.state.weights.update is None
    assert set(driver.state.fleet.control.standby) == {"a", "b"}


def test_the_trainers_own_word_ends_the_following():
    driver = following()
    by_label(driver)
    old = driver.refits.pop()
    loaded(driver, version=4)
    assert not driver.updates
    for engine in old.engines:  # late answers to the first question
        driver.feed(ev.Refitted(engine=engine, version=4, followed=True))
    assert driver.state.weights.versions.trainer == 0
    driver.answer_refit()
    assert [update.version for update in driver.updates] == [4]
    assert driver.state.weights.versions.engines == {"a": 4, "b": 4}


def test_newer_tokens_of_an_engine_lost_early_are_not_exact():
    """Their attempt was sent while the fleet was already following the newer version."""
    driver = following("a", "b", "c", batch_groups=1, group_size=1, over_provision=1.0)
    key = driver.attempts()[0]
    engine = driver.sends[key].engine
    leader = next(name for name in "abc" if name != engine)
    driver.feed(ev.VersionSeen(engine=leader, version=4))
    driver.fail(key)
    (again,) = driver.attempts()
    driver.progress(again, 3, label=4)
    driver.feed(ev.EngineLost(engine=driver.sends[again].engine, cause="gone"))
    driver.answer_refit(**dict.fromkeys("abc", (0, "names its weights 0")))
    (last,) = driver.attempts()
    driver.finish(last, 2, spans=(span(0, 2),))
    (rollout,) = driver.batches[0].rollouts
    assert not rollout.versions_exact


def test_tokens_of_weights_that_were_taken_back_are_known_by_spans_alone():
    driver = Driver(config(batch_groups=1, group_size=1, over_provision=1.0), engines=("a",))
    driver.request_batch()
    key = driver.attempts()[0]
    loaded(driver, version=2)
    driver.progress(key, 3, label=2)
    driver.answer_refit(a=(0, "names its weights 0"))
    driver.feed(ev.EngineLost(engine="a", cause="gone"))
    driver.come_back("a")
    (again,) = driver.attempts()
    driver.finish(again, 1, spans=(span(0, 1),))
    assert not next(driver.batches[0].rollouts).versions_exact


def test_an_evaluation_that_met_weights_which_are_not_followed_is_generated_again():
    driver = Driver(
        config(follow_weights=True, pace="synchronous", straggler="abort"), engines=("a", "b", "c")
    )
    driver.evaluate()
    (key,) = driver.attempts()
    driver.finish(key, 2, spans=(span(4, 2),))
    assert not driver.evaluations
    driver.answer_refit(**dict.fromkeys("abc", (0, "names its weights 0")))
    (again,) = driver.attempts()
    driver.finish(again, 2, spans=(span(0, 2),))
    batch = driver.evaluations[1]
    assert {int(v) for rollout in batch.rollouts for v in rollout.versions} == {0}


def test_an_update_that_waits_does_not_excuse_weights_of_the_same_number():
    """The update waits for the evaluation, and has loaded nothing yet."""
    driver = Driver(config(pace="synchronous"), engines=("a", "b"))
    driver.evaluate()
    (key,) = driver.attempts()
    engine = driver.sends[key].engine
    driver.feed(ev.UpdateRequested(version=1))
    driver.progress(key, 2, label=1)
    assert list(driver.state.fleet.control.standby) == [engine]
    (again,) = driver.attempts()
    driver.finish(again, 2, spans=(span(0, 2),))
    batch = driver.evaluations[1]
    assert {int(v) for rollout in batch.rollouts for v in rollout.versions} == {0}


def test_a_sleep_that_is_asked_for_ends_it_too_and_it_is_taken_up_afterwards():
    driver = following()
    by_label(driver)
    driver.refits.clear()
    driver.feed(ev.SleepRequested(tags=("kv_cache",)))
    driver.settle()
    by_watch(driver)
    assert not driver.refits
    driver.feed(ev.WakeRequested())
    driver.settle()
    by_watch(driver)
    driver.settle()
    assert driver.state.weights.versions.engines == {"a": 4, "b": 4}


def test_a_foreign_pause_is_a_stall_only_after_refit_s():
    driver = following(timeouts=Timeouts(refit_s=300.0), health=Health(stall_s=10.0))
    driver.feed(ev.VersionSeen(engine="a", version=0, paused=True))
    for _ in range(250):
        driver.now += 1.0
        driver.progress(driver.on("b")[0], 1)
        driver.feed(ev.Tick())
        driver.feed(ev.VersionSeen(engine="a", version=0, paused=True))
    assert not driver.lost
    for _ in range(100):
        driver.now += 1.0
        driver.progress(driver.on("b")[0], 1)
        driver.feed(ev.Tick())
    (lost,) = driver.lost
    assert lost.engine == "a"
    assert lost.cause.startswith("no token for ")


def test_an_engine_that_hangs_after_a_foreign_pause_is_lost():
    driver = following(health=Health(stall_s=10.0))
    driver.feed(ev.VersionSeen(engine="a", version=0, paused=True))
    driver.feed(ev.VersionSeen(engine="a", version=0, paused=False))
    for _ in range(30):
        driver.now += 1.0
        driver.progress(driver.on("b")[0], 1)
        driver.feed(ev.Tick())
    assert [lost.engine for lost in driver.lost] == ["a"]
