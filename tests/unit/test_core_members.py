"""Tests in the core what becomes of a group one of whose members is lost (`retries.member`)."""

from __future__ import annotations

import pytest

from aprilsched.config import Retries, SchedulerConfig, Staleness
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import GroupRecord
from aprilsched.kernel.store import MemoryStore, SqliteStore, Store
from aprilsched.types import Score
from tests.support.driver import Driver, Key


def config(rule: str = "again", **changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "batch_groups": 1,
        "group_size": 3,
        "over_provision": 1.0,
        "retries": Retries(attempts=1, member=rule),  # type: ignore[arg-type]
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def started(driver: Driver) -> GroupRecord:
    """The first group of a batch."""
    driver.request_batch()
    return next(driver.state.in_flight.training_groups())


def lose(driver: Driver, key: Key, tokens: int = 0) -> None:
    """Let the last attempt of a request fail, the first part of which has some tokens."""
    if tokens:
        driver.progress(key, tokens)
        driver.interrupt(key)
        driver.settle()
        key = next(each for each in driver.sends if each[0] == key[0])
    driver.fail(key, cause="HTTP 500")


def ledger(driver: Driver) -> dict[Reason, tuple[int, int]]:
    """Rollouts and tokens in the ledger by reason."""
    found = driver.state.in_flight.ledger
    return {reason: (count, found.tokens[reason]) for reason, count in found.rollouts.items()}


def test_a_member_whose_attempts_are_used_up_is_generated_again_and_its_siblings_stay():
    driver = Driver(config())
    group = started(driver)
    first, lost, last = driver.attempts(group.group_id)
    driver.finish(first, 4)
    received = len(driver.state.in_flight.rollouts)
    lose(driver, lost, tokens=5)
    assert ledger(driver) == {Reason.MEMBER_LOST: (1, 5)}
    assert len(driver.state.in_flight.rollouts) == received
    assert driver.state.in_flight.counters.regenerated == 1
    again = next(key for key in driver.attempts(group.group_id) if key != last)
    assert driver.sends[again].input_ids.tolist() == group.prompt.input_ids.tolist()
    driver.finish(last, 4)
    assert not driver.batches, "the group waits for its new member"
    driver.finish(again, 6)
    (delivered,) = driver.batches[0].groups
    assert [(r.index, len(r)) for r in delivered.rollouts] == [(0, 4), (1, 6), (2, 4)]
    assert driver.state.prompts.outcome.causes == {}, "no prompt has failed"


def test_what_still_arrives_for_a_lost_member_is_counted_as_lost():
    driver = Driver(config(), episodes=True)
    group = started(driver)
    member = group.members[0]
    driver.feed(driver.dialogues.ask(member.rollout_id))
    (key,) = driver.attempts(group.group_id)
    driver.progress(key, 3)
    driver.feed(ev.EpisodeFailed(rollout_id=member.rollout_id, cause="no sandbox", lost=True))
    assert list(driver.aborts) == [key]
    driver.progress(key, 2)
    driver.interrupt(key)
    assert ledger(driver) == {Reason.MEMBER_LOST: (1, 5)}
    replaced = group.members[0]
    assert (replaced.index, replaced.again) == (0, 1)
    assert replaced.rollout_id in driver.dialogues.thinking, "its episode restarts"


def test_after_the_last_try_the_group_is_dropped():
    driver = Driver(config(retries=Retries(attempts=1, regenerations=1)))
    group = started(driver)
    keys = driver.attempts(group.group_id)
    lose(driver, keys[0])
    assert driver.state.in_flight.groups.get(group.group_id) is group
    again = next(key for key in driver.attempts(group.group_id) if key not in keys)
    lose(driver, again)
    assert group.dropped is Reason.FAILED
    counts = {reason: count for reason, (count, _) in ledger(driver).items()}
    assert counts == {Reason.MEMBER_LOST: 1, Reason.FAILED: 1, Reason.SIBLING_FAILED: 2}


def test_each_member_has_its_own_number_of_tries():
    driver = Driver(config(retries=Retries(attempts=1, regenerations=1)))
    group = started(driver)
    for key in driver.attempts(group.group_id):
        lose(driver, key)
    assert group.dropped is None
    assert [member.again for member in group.members] == [1, 1, 1]


@pytest.mark.parametrize("refused", [True, False])
def test_what_would_fail_again_drops_the_group(refused: bool):
    driver = Driver(config(), engines=("a",), reward_scope="rollout")
    group = started(driver)
    if refused:
        driver.fail(driver.attempts(group.group_id)[0], final=True)
    else:
        driver.feed(ev.RewardFailed(group_id=group.group_id, cause="a bug"))
    assert group.dropped is not None
    assert Reason.MEMBER_LOST not in ledger(driver)


def test_an_episode_that_raised_another_error_drops_its_group():
    driver = Driver(config(), episodes=True)
    group = started(driver)
    driver.feed(ev.EpisodeFailed(rollout_id=group.members[1].rollout_id, cause="a bug"))
    assert group.dropped is Reason.EPISODE_FAILED


def test_a_response_whose_reward_is_lost_is_scored_again_and_not_generated_again():
    driver = Driver(config(), reward_scope="rollout")
    group = started(driver)
    first, *_ = driver.attempts(group.group_id)
    driver.finish(first, 4)
    for tries in (1, 2):
        asked = driver.scores.pop()
        lost = asked.rollout.rollout_id
        driver.feed(ev.RewardFailed(group_id=group.group_id, cause="no sandbox", lost=lost))
        assert len(driver.scores) == 1, tries
    assert not driver.state.in_flight.ledger.total
    driver.feed(ev.Rewarded(rollout_id=lost, score=Score(reward=1.0)))
    assert group.members[0].reward == 1.0
    driver.finish(driver.attempts(group.group_id)[0], 4)
    lost = driver.scores[-1].rollout.rollout_id
    for _ in range(3):
        driver.feed(ev.RewardFailed(group_id=group.group_id, cause="no sandbox", lost=lost))
    assert group.dropped is Reason.REWARD_FAILED, "after three tries"


@pytest.mark.parametrize("lost_last", [True, False])
@pytest.mark.parametrize("scope", ["none", "rollout", "group"])
def test_a_group_shrinks_and_is_delivered_without_its_lost_member(scope: str, lost_last: bool):
    driver = Driver(config("shrink"), reward_scope=scope)  # type: ignore[arg-type]
    group = started(driver)
    lost, *others = driver.attempts(group.group_id)
    if not lost_last:
        lose(driver, lost, tokens=5)
    driver.finish_each(others, 4)
    if lost_last:
        lose(driver, lost, tokens=5)
    driver.settle()
    for asked in driver.scores:
        driver.feed(ev.Rewarded(rollout_id=asked.rollout.rollout_id, score=Score(reward=1.0)))
    for asked in driver.group_scores:
        assert len(asked.group.rollouts) == 2
        scores = (Score(reward=1.0), Score(reward=0.0))
        driver.feed(ev.GroupRewarded(group_id=asked.group.group_id, scores=scores))
    (delivered,) = driver.batches[0].groups
    assert [rollout.index for rollout in delivered.rollouts] == [1, 2]
    assert ledger(driver) == {Reason.MEMBER_LOST: (1, 5)}


def test_a_complete_group_shrinks_when_a_reward_is_lost():
    driver = Driver(config("shrink"), reward_scope="rollout", accepts=True)
    group = started(driver)
    driver.finish_group(group.group_id, 4)
    assert driver.state.in_flight.ready.samples == 3
    first, second, third = (asked.rollout.rollout_id for asked in driver.scores)
    driver.feed(ev.Rewarded(rollout_id=first, score=Score(reward=1.0)))
    driver.feed(ev.Rewarded(rollout_id=second, score=Score(reward=0.0)))
    driver.feed(ev.RewardFailed(group_id=group.group_id, cause="no sandbox", lost=third))
    (asked,) = driver.verdicts
    assert len(asked.group.rollouts) == 2
    driver.feed(ev.Filtered(group_id=group.group_id, accepted=True))
    assert [len(each.rollouts) for each in driver.batches[0].groups] == [2]
    assert ledger(driver) == {Reason.MEMBER_LOST: (1, 4)}


def test_a_group_is_dropped_before_it_is_smaller_than_the_smallest():
    driver = Driver(config("shrink"))
    group = started(driver)
    first, second, _ = driver.attempts(group.group_id)
    lose(driver, first)
    assert (group.size, group.dropped) == (2, None)
    lose(driver, second)
    assert group.dropped is Reason.FAILED


def test_a_restarted_group_has_its_full_size():
    rule = config("shrink", max_staleness=Staleness(0, rule="restart"), straggler="abort")
    driver = Driver(rule)
    group = started(driver)
    first, second, _ = driver.attempts(group.group_id)
    driver.progress(second, 2)
    lose(driver, first)
    driver.update()
    driver.settle()
    driver.settle_controls()
    driver.request_batch()
    (again,) = driver.state.in_flight.training_groups()
    assert again.again == group.group_id
    assert len(again.members) == 3


def test_with_drop_group_a_lost_member_drops_its_group():
    driver = Driver(config("drop_group"))
    group = started(driver)
    lose(driver, driver.attempts(group.group_id)[0])
    assert group.dropped is Reason.FAILED


@pytest.mark.parametrize(("rule", "size"), [("again", 2), ("shrink", 1)])
def test_an_evaluation_keeps_the_rule_and_may_shrink_to_one_response(rule: str, size: int):
    driver = Driver(config(rule))
    driver.evaluate(group_size=2, evaluation_id=0)
    group_id = next(iter(driver.state.in_flight.groups))
    lose(driver, driver.attempts(group_id)[0], tokens=3)
    driver.finish_group(group_id, 4)
    assert [len(group.rollouts) for group in driver.evaluations[0].groups] == [size]
    assert ledger(driver) == {Reason.MEMBER_LOST: (1, 3)}


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@pytest.mark.parametrize("rule", ["again", "shrink"])
@pytest.mark.parametrize("saved_before", [True, False])
def test_a_restart_continues_with_the_present_members(
    rule: str, kind: str, saved_before: bool, tmp_path: object
):
    store: Store = MemoryStore() if kind == "memory" else SqliteStore(f"{tmp_path}/run.db")
    store.open()
    driver = Driver(config(rule), store=store)
    group = started(driver)
    first, lost, _ = driver.attempts(group.group_id)
    driver.finish(first, 4)
    if saved_before:
        driver.save()
    lose(driver, lost, tokens=5)
    members = [(m.rollout_id, m.index, m.again) for m in group.members]
    driver.save()
    store.close()
    driver.restart()
    driver.request_batch()
    driver.settle()
    restored = driver.state.in_flight.groups[group.group_id]
    assert [(m.rollout_id, m.index, m.again) for m in restored.members] == members
    assert (restored.size, restored.lost) == (group.size, group.lost)
    assert ledger(driver) == {Reason.MEMBER_LOST: (1, 5)}
    driver.finish_group(group.group_id, 6)
    (delivered,) = driver.batches[-1].groups
    assert len(delivered.rollouts) == group.size
    store.close()


def test_listeners_learn_which_rollout_replaces_a_lost_one():
    received: list[facts.Fact] = []
    driver = Driver(config(), hears=received.extend)
    group = started(driver)
    gone = group.members[0].rollout_id
    lose(driver, driver.attempts(group.group_id)[0])
    (dropped,) = (each for each in received if isinstance(each, facts.GroupDropped))
    assert dropped.rollout_ids == (gone,)
    assert dropped.group_id != group.group_id
    (launched,) = (each for each in received if isinstance(each, facts.MemberLaunched))
    assert (launched.group_id, launched.instead_of) == (group.group_id, gone)
    assert launched.rollout_id == group.members[0].rollout_id
