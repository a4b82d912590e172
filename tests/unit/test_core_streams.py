"""Tests batches that the trainer takes group by group, in the core."""

from __future__ import annotations

from aprilsched.config import SchedulerConfig, Staleness
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts as of
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.store import MemoryStore
from tests.support.driver import Driver


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {"batch_groups": 3, "group_size": 2, "over_provision": 2.0}
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def ask(driver: Driver) -> list[int]:
    """Ask for a streamed batch; returns the groups that are open then."""
    driver.feed(ev.BatchRequested(streamed=True))
    return driver.group_ids()


def given(driver: Driver) -> list[tuple[int, ...]]:
    """The groups of each part that was offered."""
    return [tuple(group.group_id for group in part.groups) for part in driver.offers]


def test_each_group_is_offered_when_it_is_accepted_and_the_last_one_ends_the_batch():
    driver = Driver(config())
    ids = ask(driver)
    for count, group_id in enumerate(ids[:3], start=1):
        assert not driver.batches
        driver.finish_group(group_id)
        assert given(driver) == [(each,) for each in ids[:count]]
    assert [part.complete for part in driver.offers] == [False, False, True]
    (batch,) = driver.batches
    assert [group.group_id for group in batch.groups] == ids[:3]
    # The trainer has the very groups that it was given before.
    assert [part.groups[0] for part in driver.offers] == list(batch.groups)
    assert driver.state.in_flight.counters.batches == 1
    assert not driver.state.delivery.batch_requested


def test_engines_generate_while_the_trainer_is_busy_with_a_group():
    driver = Driver(config(), takes=False)
    ids = ask(driver)
    driver.finish_group(ids[0])
    driver.finish_group(ids[1])
    assert len(driver.offers) == 1
    assert not any(isinstance(each, do.Pause) for each in driver.controls)
    driver.finish_group(ids[2])
    assert any(isinstance(each, do.Pause) for each in driver.controls)
    for _ in range(3):
        driver.take()
    assert len(driver.batches) == 1


def test_an_update_ends_the_batch_with_the_groups_that_were_taken():
    heard: list[of.Fact] = []
    driver = Driver(config(), takes=False, hears=heard.extend)
    ids = ask(driver)
    driver.finish_groups(ids[:2])
    driver.take()
    driver.feed(ev.UpdateRequested(version=1))
    (batch,) = driver.batches
    assert [group.group_id for group in batch.groups] == ids[:1]
    assert batch.version == 0
    kinds = [type(fact) for fact in heard]
    assert kinds.index(of.BatchDelivered) < kinds.index(of.UpdateBegun)
    driver.settle()
    driver.takes = True
    ask(driver)
    # The second group was offered and not taken, so it opens the next batch.
    assert given(driver)[-1] == (ids[1],)
    assert driver.offers[-1].version == 1
    assert driver.offers[-1].index == 1


def test_a_request_for_a_whole_batch_ends_a_streamed_one():
    driver = Driver(config())
    ids = ask(driver)
    driver.finish_group(ids[0])
    driver.feed(ev.BatchRequested())
    assert [group.group_id for group in driver.batches[0].groups] == ids[:1]
    driver.finish_groups(ids[1:4])
    assert [group.group_id for group in driver.batches[1].groups] == ids[1:4]


def test_a_whole_batch_that_is_offered_can_be_taken_group_by_group():
    driver = Driver(config(), takes=False, store=MemoryStore())
    driver.request_batch()
    ids = driver.group_ids()
    driver.finish_groups(ids[:3])
    assert driver.offers[-1].complete
    driver.takes = True
    ask(driver)
    assert given(driver)[-3:] == [(each,) for each in ids[:3]]
    assert len(driver.batches) == 1


def test_a_batch_ends_without_a_further_group_if_what_it_waited_for_is_dropped():
    driver = Driver(config(over_provision=1.0), supply=3)
    ids = ask(driver)
    driver.finish_groups(ids[:2])
    assert not driver.batches
    driver.feed(ev.GroupWithdrawn(group_id=ids[2], cause="the test drops it"))
    assert given(driver)[-1] == ()
    assert driver.offers[-1].complete
    assert [group.group_id for group in driver.batches[0].groups] == ids[:2]
    ask(driver)
    assert driver.ended


def test_a_group_that_the_trainer_has_cannot_be_withdrawn():
    driver = Driver(config())
    ids = ask(driver)
    driver.finish_group(ids[0])
    driver.feed(ev.GroupWithdrawn(group_id=ids[0], cause="too late"))
    assert not driver.state.in_flight.ledger.rollouts[Reason.WITHDRAWN]
    driver.feed(ev.GroupWithdrawn(group_id=ids[1], cause="in time"))
    assert driver.state.in_flight.ledger.rollouts[Reason.WITHDRAWN] == 2


def test_a_group_that_is_offered_to_the_trainer_cannot_be_withdrawn():
    driver = Driver(config(), takes=False)
    ids = ask(driver)
    driver.finish_group(ids[0])
    driver.feed(ev.GroupWithdrawn(group_id=ids[0], cause="too late"))
    driver.take()
    assert list(driver.state.delivery.fresh.taken) == [ids[0]]
    assert not driver.state.in_flight.ledger.rollouts[Reason.WITHDRAWN]


def test_room_is_left_for_groups_that_the_batch_must_contain():
    driver = Driver(config(max_staleness=Staleness(1, rule="finish"), over_provision=2.0))
    first = ask(driver)
    for group_id in first[3:]:  # tokens of version 0, which are too old after version 1
        driver.progress_each(driver.attempts(group_id), 1)
    driver.finish_groups(first[:3])
    driver.update()
    driver.settle()
    ask(driver)
    due = [each for each in first[3:] if each in driver.state.in_flight.groups]
    new = [each for each in driver.group_ids() if each not in due]
    assert len(due) == 3
    driver.finish_groups(new[:3])
    # All three places belong to groups that still generate.
    assert len(driver.offers) == 3
    driver.finish_groups(due)
    assert [group.group_id for group in driver.batches[1].groups] == due


def test_a_restart_gives_a_batch_from_its_first_group():
    driver = Driver(config(), store=MemoryStore())
    ids = ask(driver)
    driver.finish_groups(ids[:2])
    driver.save()
    driver.restart()
    ask(driver)
    assert given(driver)[-2:] == [(ids[0],), (ids[1],)]
    driver.finish_group(ids[2])
    assert [group.group_id for group in driver.batches[-1].groups] == ids[:3]
    driver.restart()
    offers = len(driver.offers)
    ask(driver)
    # The batch was not acknowledged, so all of it is given again.
    assert given(driver)[offers:] == [(each,) for each in ids[:3]]
    assert all(part.redelivered for part in driver.offers[offers:])
    assert [part.complete for part in driver.offers[offers:]] == [False, False, True]
    assert driver.state.in_flight.counters.batches == 1


def test_groups_of_the_batch_in_work_stay_known_while_another_batch_is_delivered_again():
    driver = Driver(config(), store=MemoryStore())
    driver.finish_groups(ask(driver)[:3])
    taken = ask(driver)[0]
    driver.finish_group(taken)
    assert list(driver.state.delivery.fresh.taken) == [taken]
    driver.save()
    driver.restart()
    driver.takes = False
    driver.request_batch()
    assert driver.offers[-1].redelivered
    driver.save()
    driver.restart()
    assert driver.state.delivery.fresh.seen == {taken}
