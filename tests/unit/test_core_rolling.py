"""Tests rolling refits: engines of several versions, and no rollout of two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from aprilsched.config import Pool, Prices, SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.repack import Load, is_worth_freeing, surplus
from aprilsched.kernel.core.state.engine_control import Mode
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.store import MemoryStore
from aprilsched.types import VersionSpan
from tests.support.driver import Driver, config, names, span

FREE_MOVES = Prices(step_seconds=1.0, prefill_tokens_per_s=1e9)
"""Recomputing costs next to nothing."""


def rolling(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "straggler": "run",
        "refit": "rolling",
        "refill": Pool(together=1),
        # Nothing is moved unless a test wants it.
        "prices": Prices(step_seconds=0.0),
    }
    return config(**{**values, **changes})


def started(driver: Driver) -> Driver:
    """The driver with its first requests on their way, and two tokens of each."""
    driver.request_batch()
    driver.progress_each(driver.attempts(), 2)
    return driver


def update(driver: Driver) -> list[do.Command]:
    version = driver.state.weights.versions.trainer + 1
    return driver.feed(ev.UpdateRequested(version=version, republishable=True))


def end_all(driver: Driver, engine: str) -> None:
    for key in driver.on(engine):
        if key in driver.sends:
            driver.finish(key)


def versions(driver: Driver) -> dict[str, int]:
    return dict(driver.state.weights.versions.engines)


def test_an_update_ends_at_once_and_stops_no_engine():
    driver = started(Driver(rolling()))
    assert names(update(driver)) == ["UpdateFinished"]
    assert driver.state.weights.versions.trainer == 1
    assert versions(driver) == {"a": 0, "b": 0}
    assert not driver.controls
    assert all(c.mode is Mode.RUNNING for c in driver.state.fleet.control.engines.values())


def test_an_engine_takes_the_version_when_its_last_response_ends():
    driver = started(Driver(rolling()))
    update(driver)
    end_all(driver, "a")
    assert [type(c).__name__ for c in driver.controls] == ["Pause"]
    assert driver.controls[0].engine == "a"
    driver.settle()
    assert versions(driver) == {"a": 1, "b": 0}
    assert driver.on("b")  # they run on under their version


def test_new_rollouts_go_to_an_engine_of_the_newest_version_only():
    driver = started(Driver(rolling()))
    update(driver)
    before = len(driver.sent)
    end_all(driver, "a")
    driver.settle()
    new = driver.sent[before:]
    assert new
    assert {send.engine for send in new} == {"a"}
    assert {r.version for r in driver.state.in_flight.open_requests("a")} == {1}
    assert {r.version for r in driver.state.in_flight.open_requests("b")} == {0}


def test_an_interrupted_response_continues_only_at_its_version():
    driver = started(Driver(rolling(), engines=("a", "b", "c")))
    update(driver)
    end_all(driver, "a")
    driver.settle()
    key = driver.on("b")[0]
    driver.fail(key, "the connection broke")
    again = next(send for send in driver.sent[::-1] if send.request_id == key[0])
    assert again.attempt == 2
    assert again.engine == "c"  # not a, which is at version 1, nor b, which has failed
    assert len(again.input_ids) == 4


def test_a_rollout_restarts_once_no_engine_has_its_version():
    driver = started(Driver(rolling()))
    update(driver)
    end_all(driver, "a")
    driver.settle()
    rollouts = [driver.sends[key].rollout_id for key in driver.on("b")]
    driver.feed(ev.EngineLost(engine="b", cause="killed"))
    assert driver.state.in_flight.ledger.tokens[Reason.VERSION_LOST] == 2 * len(rollouts)
    assert not driver.state.in_flight.ledger.total  # the rollouts themselves are still in flight
    for rollout_id in rollouts:
        send = next(send for send in driver.sent[::-1] if send.rollout_id == rollout_id)
        assert (send.engine, len(send.input_ids)) == ("a", 2)
    driver.progress_each(driver.on("a"), 1)
    for rollout_id in rollouts:
        assert driver.state.in_flight.rollouts[rollout_id].log.oldest_version == 1


def test_an_engine_that_should_take_over_is_lost_and_the_other_one_stays():
    """The engine that was about to leave has the only copy of its version then."""
    driver = started(Driver(rolling(prices=FREE_MOVES)))
    driver.state.expectations.remaining = lambda _: 1000.0  # type: ignore[method-assign]
    update(driver)
    # Two rollouts end, so that requests of the newest version wait.
    driver.finish_each(driver.on("a")[:3])
    leaving = {c.name for c in driver.state.fleet.control.engines.values() if c.catching_up}
    assert leaving == {"a"}
    assert driver.aborts
    assert not driver.controls  # everything is aborted before any pause
    kept = [driver.state.in_flight.requests[key[0]].rollout for key in driver.on("a")]
    driver.feed(ev.EngineLost(engine="b", cause="killed"))
    assert not driver.state.fleet.control.engines["a"].catching_up
    driver.interrupt(next(iter(driver.aborts)))
    assert {driver.sends[key].engine for key in driver.attempts()} == {"a"}
    assert not driver.state.in_flight.ledger.tokens[Reason.VERSION_LOST]
    assert all(rollout.log.size == 2 for rollout in kept)


def test_moved_responses_are_recomputed_once_and_end_under_their_version():
    driver = started(Driver(rolling(prices=FREE_MOVES)))
    driver.state.expectations.remaining = lambda _: 1000.0  # type: ignore[method-assign]
    update(driver)
    driver.finish_each(driver.on("a")[:3])
    moved = driver.sends[next(iter(driver.aborts))]
    driver.settle()
    assert versions(driver) == {"a": 1, "b": 0}
    again = next(s for s in driver.sent[::-1] if s.request_id == moved.request_id)
    assert (again.engine, again.attempt) == ("b", moved.attempt + 1)
    before = driver.state.in_flight.counters.tokens_reprefilled
    driver.progress((again.request_id, again.attempt), 1)
    assert driver.state.in_flight.counters.tokens_reprefilled - before == 4


def test_two_updates_in_a_row_and_an_engine_goes_directly_to_the_second():
    driver = started(Driver(rolling()))
    update(driver)
    update(driver)
    end_all(driver, "a")
    driver.settle()
    assert versions(driver) == {"a": 2, "b": 0}


def test_an_engine_that_loads_while_the_next_update_comes_takes_that_too():
    driver = started(Driver(rolling()))
    update(driver)
    end_all(driver, "a")
    driver.settle_controls()
    assert [refit.version for refit in driver.refits] == [1]
    update(driver)
    driver.answer_refit()
    driver.settle()
    assert versions(driver) == {"a": 2, "b": 0}


def test_an_evaluation_is_of_one_version_and_an_update_waits_for_it():
    driver = started(Driver(rolling()))
    update(driver)
    end_all(driver, "a")
    driver.settle()
    driver.evaluate(2)
    evaluated = [s for s in driver.sent if s.group_id in _evaluated(driver)]
    assert {send.engine for send in evaluated} == {"a"}
    assert names(update(driver)) == []
    for send in evaluated:
        driver.finish((send.request_id, send.attempt))
    assert driver.updates[-1].version == 2
    assert [set(r.versions) for r in driver.evaluations[1].rollouts] == [{1}, {1}]


def test_an_evaluation_has_an_engine_freed_for_it_whatever_that_costs():
    driver = started(Driver(rolling()))
    update(driver)
    driver.evaluate()
    assert driver.aborts
    driver.settle()
    assert sorted(versions(driver).values()) == [0, 1]
    assert driver.state.in_flight.ledger.tokens[Reason.VERSION_LOST] == 0


def test_an_evaluation_before_a_sleep_still_gets_an_engine_of_its_version():
    """The sleep waits for the evaluation, and the evaluation for the version."""
    driver = started(Driver(rolling(), engines=("a",)))
    update(driver)
    driver.evaluate()
    driver.feed(ev.SleepRequested(tags=("kv_cache",)))
    end_all(driver, "a")
    driver.settle()
    assert versions(driver) == {"a": 1}
    end_all(driver, "a")
    driver.settle()
    assert 1 in driver.evaluations
    assert names(driver.sleeps) == ["SleepBegun"]


def test_before_a_sleep_what_waits_for_an_old_version_gives_way_to_an_evaluation():
    driver = started(Driver(rolling(), engines=("a",)))
    update(driver)
    driver.evaluate()
    driver.feed(ev.SleepRequested(tags=("kv_cache",)))
    driver.fail(driver.attempts()[0], "broke off")  # it is not sent again before the sleep
    end_all(driver, "a")
    driver.settle()
    assert versions(driver) == {"a": 1}
    assert driver.state.in_flight.ledger.tokens[Reason.VERSION_LOST] == 2
    end_all(driver, "a")
    driver.settle()
    assert 1 in driver.evaluations
    assert names(driver.sleeps) == ["SleepBegun"]


def _evaluated(driver: Driver) -> set[int]:
    return {g.group_id for gs in driver.state.evaluations.running.values() for g in gs}


def test_an_engine_that_fails_to_load_does_not_stop_the_others():
    driver = started(Driver(rolling()))
    update(driver)
    end_all(driver, "a")
    driver.settle_controls()
    driver.answer_refit(a=(0, "no such file"))
    assert list(driver.state.fleet.control.standby) == ["a"]
    assert versions(driver) == {"b": 0}
    update(driver)
    driver.settle()
    assert versions(driver) == {"a": 2, "b": 0}


def test_a_sleep_waits_for_the_engine_that_is_being_refitted():
    driver = started(Driver(rolling(), keeps_weights=True))
    update(driver)
    end_all(driver, "a")
    driver.settle_controls()
    driver.feed(ev.SleepRequested(tags=("kv_cache",)))
    end_all(driver, "b")
    driver.settle_controls()
    assert not driver.sleeps
    driver.settle()
    assert names(driver.sleeps) == ["SleepBegun"]
    driver.feed(ev.WakeRequested())
    driver.settle()
    assert versions(driver) == {"a": 1, "b": 1}
    assert driver.attempts()


def test_an_update_in_a_sleep_reaches_all_engines_together():
    driver = started(Driver(rolling(), keeps_weights=True))
    key = driver.attempts()[0]
    driver.feed(ev.SleepRequested(tags=("kv_cache",)))
    driver.fail(key, "broke off")  # it waits with its tokens
    driver.finish_each(driver.attempts())
    driver.settle()
    update(driver)
    driver.settle()
    driver.feed(ev.WakeRequested())
    driver.settle()
    assert versions(driver) == {"a": 1, "b": 1}
    assert driver.state.in_flight.ledger.tokens[Reason.VERSION_LOST] == 2


def test_a_resumed_run_continues_each_rollout_under_its_version():
    driver = started(Driver(rolling(), store=MemoryStore()))
    update(driver)
    end_all(driver, "a")
    driver.settle()
    waiting = [driver.sends[key].rollout_id for key in driver.on("b")]
    driver.save()
    driver.restart(versions=(1, 0))
    assert versions(driver) == {"a": 1, "b": 0}
    driver.request_batch()
    sent = {send.rollout_id: send for send in driver.sends.values()}
    assert {sent[rollout_id].engine for rollout_id in waiting} == {"b"}
    assert {len(sent[rollout_id].input_ids) for rollout_id in waiting} == {4}
    others = [send for send in sent.values() if send.rollout_id not in waiting]
    assert {send.engine for send in others} <= {"a"}
    end_all(driver, "b")
    # Version 1 cannot be published again before the trainer's next update.
    assert list(driver.state.fleet.control.standby) == ["b"]
    update(driver)
    driver.settle()
    assert versions(driver)["b"] == 2


def test_a_rollout_on_a_restarted_engine_restarts_unmixed():
    driver = started(Driver(rolling(), version=3))
    key = driver.on("a")[0]
    rollout_id = driver.sends[key].rollout_id
    spans = [VersionSpan(version=v, start=2 * i, end=2 * i + 2) for i, v in enumerate((3, 0))]
    driver.finish(key, 2, spans=tuple(spans))
    rollout = driver.state.in_flight.rollouts[rollout_id]
    assert "a" in driver.state.fleet.control.standby
    assert rollout.log.size == 0
    assert driver.state.in_flight.ledger.tokens[Reason.VERSION_LOST] == 4


def test_an_update_includes_an_engine_that_is_catching_up():
    """Otherwise it would wait forever for that engine once the others are lost."""
    driver = started(Driver(rolling()))
    update(driver)
    for engine in ("a", "b"):
        end_all(driver, engine)
        driver.settle()
    assert versions(driver) == {"a": 1, "b": 1}
    driver.evaluate()
    driver.feed(ev.UpdateRequested(version=2))
    driver.feed(ev.EngineJoined(info=driver.info("c", 0)))
    assert driver.state.fleet.control.standby["c"].catching_up
    driver.feed(ev.EvaluationWithdrawn(evaluation_id=1))
    for engine in ("a", "b"):
        driver.feed(ev.EngineLost(engine=engine, cause="killed"))
    driver.settle()
    assert driver.state.weights.update is None
    assert versions(driver) == {"c": 2}


def test_an_episode_keeps_an_engine_of_its_version_between_two_turns():
    driver = Driver(rolling(), episodes=True)
    driver.request_batch()
    for rollout_id in list(driver.dialogues.thinking):
        driver.feed(driver.dialogues.ask(rollout_id))
    driver.finish_each(driver.attempts(), 2)
    thinking = list(driver.dialogues.thinking)
    update(driver)
    driver.settle()
    # One of the two engines is enough for all that think.
    assert sorted(versions(driver).values()) == [0, 1]
    old = next(name for name, version in versions(driver).items() if version == 0)
    driver.feed(driver.dialogues.ask(thinking[0]))
    assert driver.sends[driver.attempts()[-1]].engine == old
    driver.feed(ev.EngineLost(engine=old, cause="killed"))
    assert driver.state.in_flight.ledger.rollouts == {Reason.MEMBER_LOST: 1}
    started = driver.state.in_flight.rollouts.keys() & driver.dialogues.thinking.keys()
    assert max(started) > max(thinking), "the lost episode restarts"


def test_after_idle_time_a_turn_uses_an_engine_of_its_version():
    """If engines of another version counted as candidates, the turn would wait forever."""
    driver = Driver(rolling(), engines=("a", "b", "c"), episodes=True)
    driver.request_batch()
    for rollout_id in list(driver.dialogues.thinking):
        driver.feed(driver.dialogues.ask(rollout_id))
    driver.finish_each(driver.attempts(), 2)
    update(driver)
    driver.settle()
    old = next(name for name, version in versions(driver).items() if version == 0)
    rollouts = driver.state.in_flight.rollouts
    moved = next(i for i in driver.dialogues.thinking if rollouts[i].group.engine != old)
    driver.now += 30.0
    driver.feed(driver.dialogues.ask(moved))
    assert driver.sends[driver.attempts()[-1]].engine == old


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"pace": "synchronous"}, 'set pace="asynchronous" and straggler="run"'),
        ({"straggler": "retract"}, 'set pace="asynchronous" and straggler="run"'),
        ({"follow_weights": True}, "leave it False"),
    ],
)
def test_settings_that_contradict_rolling_are_refused(changes: dict[str, object], part: str):
    with pytest.raises(ConfigError, match=part):
        rolling(**changes)


# --- the policy ----------------------------------------------------------------------------------


def load(engine: str, requests: int, *, room: int | None = None, kv: int | None = None) -> Load:
    return Load(
        engine=engine,
        requests=requests,
        room=room,
        kv_tokens=kv,
        contexts=lambda: 1000 * requests,
        remaining=lambda: 2000.0,
    )


PRICES = Prices(step_seconds=1e-3, prefill_tokens_per_s=10_000)


def engine_to_free(
    loads: Sequence[Load], *, requests: int, share: float, prices: Prices, needed: bool
) -> str | None:
    """Return the engine whose requests move to the others of its version, or None."""
    if len(loads) < 2:
        return None
    least = min(loads, key=lambda load: (load.requests, load.engine))
    worth = is_worth_freeing(
        least,
        lambda: [load for load in loads if load is not least],
        engines=len(loads),
        requests=requests,
        share=share,
        prices=prices,
        needed=needed,
    )
    return least.engine if worth else None


def test_requests_are_moved_when_waiting_costs_more():
    # 4 requests cost 0.4 s to move. Waiting costs 2,000 steps of 1 ms times the missing share.
    loads = [load("a", 4), load("b", 6)]
    assert surplus(engines=2, requests=10, share=8) == 0.75
    assert engine_to_free(loads, requests=10, share=8, prices=PRICES, needed=False) == "a"
    assert engine_to_free(loads, requests=10, share=5.2, prices=PRICES, needed=False) is None
    assert engine_to_free(loads, requests=10, share=5.2, prices=PRICES, needed=True) == "a"


def test_requests_are_not_moved_where_they_find_no_room():
    for short in ({"room": 9}, {"kv": 9_999}):
        loads = [load("a", 4, **short), load("b", 6, **short)]
        assert engine_to_free(loads, requests=10, share=20, prices=PRICES, needed=False) is None
    for wide in ({"room": 10}, {"kv": 10_000}):
        loads = [load("a", 4, **wide), load("b", 6, **wide)]
        assert engine_to_free(loads, requests=10, share=20, prices=PRICES, needed=True) == "a"


def test_the_last_engine_of_a_version_is_not_freed():
    assert engine_to_free([load("a", 1)], requests=1, share=9, prices=PRICES, needed=True) is None


def test_every_delivered_rollout_has_one_version():
    """A run of many updates in which responses end in a random order."""
    random = np.random.default_rng(1)
    driver = Driver(rolling(prices=FREE_MOVES), engines=("a", "b", "c"))
    driver.state.expectations.remaining = lambda _: 100.0  # type: ignore[method-assign]
    driver.request_batch()
    for _ in range(600):
        driver.settle()
        keys = driver.attempts()
        key = keys[int(random.integers(len(keys)))]
        if random.random() < 0.3:
            driver.finish(key, 1)
        else:
            driver.progress(key, 1)
        if driver.batches and len(driver.batches) > driver.state.weights.versions.trainer:
            update(driver)
            driver.request_batch()
    assert len(driver.batches) > 10
    found = [set(r.versions) for batch in driver.batches for r in batch.rollouts]
    assert {len(one) for one in found} == {1}
    assert any(len({v for r in b.rollouts for v in r.versions}) > 1 for b in driver.batches)


def test_an_episode_that_keeps_a_withdrawn_turn_of_other_weights_is_dropped():
    driver = Driver(rolling(), episodes=True, version=3)
    driver.request_batch()
    rollout_id = next(iter(driver.dialogues.thinking))
    driver.feed(driver.dialogues.ask(rollout_id))
    driver.finish(driver.attempts()[0], 2)
    driver.feed(driver.dialogues.ask(rollout_id))
    (key,) = driver.attempts()
    driver.feed(driver.dialogues.withdraw(rollout_id))
    # The engine was restarted, and its answer comes before the abort.
    driver.finish(key, 2, spans=(span(0, 2),))
    driver.feed(driver.dialogues.keep(rollout_id))
    driver.feed(driver.dialogues.end(rollout_id))
    assert driver.state.in_flight.ledger.rollouts[Reason.VERSION_LOST] == 1
