"""Tests what a resumed run requests for responses whose tokens were all known."""

from __future__ import annotations

import pytest

from aprilsched import Batch, MemoryStore, SchedulerConfig
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.types import SamplingParams
from tests.support.driver import Driver, span

CONFIG = SchedulerConfig(
    batch_groups=1,
    group_size=1,
    over_provision=1.0,
    pace="asynchronous",
    sampling=SamplingParams(max_new_tokens=5),
)


def test_a_request_of_which_only_the_end_is_not_known_is_asked_for_its_last_token():
    driver = Driver(CONFIG, store=MemoryStore())
    driver.feed(ev.BatchRequested())
    driver.progress(driver.attempts()[0], 5, first=10)
    driver.save()
    driver.restart()
    (send,) = driver.sends.values()
    assert send.input_ids.tolist()[-4:] == [10, 11, 12, 13]
    assert send.sampling.max_new_tokens == 1
    driver.request_batch()
    driver.progress(driver.attempts()[0], 1, first=14)
    driver.finish(driver.attempts()[0], 0)
    ((rollout,),) = (group.rollouts for group in driver.batches[0].groups)
    assert rollout.token_ids.tolist() == [10, 11, 12, 13, 14]
    counters = driver.core.state.in_flight.counters
    assert (counters.tokens_generated, counters.tokens_discarded) == (6, 1)


def test_an_episode_that_asks_for_less_than_was_known_is_given_no_more():
    driver = Driver(CONFIG, episodes=True, store=MemoryStore())
    driver.feed(ev.BatchRequested())
    started = driver.episodes_started[0]
    context = started.prompt.input_ids.copy()
    asks = ev.TurnRequested(rollout_id=started.rollout_id, input_ids=context)
    driver.feed(asks)
    driver.progress(driver.attempts()[0], 4, first=10)
    driver.save()
    driver.restart()
    less = SamplingParams(max_new_tokens=2)
    driver.feed(
        ev.TurnRequested(rollout_id=asks.rollout_id, input_ids=asks.input_ids, sampling=less)
    )
    (send,) = driver.sends.values()
    assert send.input_ids.tolist()[-1] == 10
    assert send.sampling.max_new_tokens == 1
    driver.finish(driver.attempts()[0], 1)
    assert len(driver.resolved[-1].token_ids) == 2
    counters = driver.core.state.in_flight.counters
    assert (counters.tokens_generated, counters.tokens_discarded) == (5, 3)


def test_tokens_that_came_after_a_refit_are_not_of_a_known_version_once_their_process_is_gone():
    driver = Driver(CONFIG, store=MemoryStore())
    driver.feed(ev.BatchRequested())
    (key,) = driver.attempts()
    driver.update()
    assert key in driver.sends
    # Sampled before the pause or after the refit: only the spans at the end would tell.
    driver.progress(key, 2, first=10)
    driver.save()
    driver.restart()
    driver.request_batch()
    driver.finish(driver.attempts()[0], 3)
    ((rollout,),) = (group.rollouts for group in driver.batches[0].groups)
    assert not rollout.versions_exact


def test_they_are_once_the_engine_has_reported():
    driver = Driver(CONFIG, store=MemoryStore())
    driver.feed(ev.BatchRequested())
    (key,) = driver.attempts()
    driver.update()
    driver.progress(key, 2, first=10)
    driver.save()
    spans = (span(0, 1), span(1, 2, 1))
    driver.interrupt(key, spans=spans)
    driver.save()
    driver.restart()
    driver.request_batch()
    driver.finish(driver.attempts()[0], 3)
    ((rollout,),) = (group.rollouts for group in driver.batches[0].groups)
    assert rollout.versions_exact
    assert rollout.versions.tolist() == [0, 1, 1, 1, 1]


def test_tokens_under_a_newer_label_in_a_refit_are_not_of_a_known_version_after_a_restart():
    driver = Driver(CONFIG, store=MemoryStore())
    driver.feed(ev.BatchRequested())
    driver.feed(ev.UpdateRequested(version=1, adapter=True))
    # Who takes part in the refit is not put on standby for the label: its request stays open.
    driver.progress(driver.attempts()[0], 2, label=1)
    driver.save()
    driver.restart()
    driver.request_batch()
    driver.finish(driver.attempts()[0], 3)
    ((rollout,),) = (group.rollouts for group in driver.batches[0].groups)
    assert not rollout.versions_exact


def test_another_trainer_gets_the_batches_that_were_not_acknowledged():
    driver = Driver(CONFIG, store=MemoryStore())
    for _ in range(3):
        driver.request_batch()
        driver.finish(driver.attempts()[0], 1)
    driver.feed(ev.BatchesAcknowledged(batches=(0,)))
    driver.feed(ev.TrainerReturned(batches=()))
    for _ in range(2):
        driver.request_batch()
    assert [batch.index for batch in driver.redelivered] == [1, 2]
    for old, new in zip(driver.batches[1:], driver.redelivered, strict=True):
        assert new.redelivered
        ((first,), (second,)) = ([*batch.rollouts] for batch in (old, new))
        assert first.token_ids.tolist() == second.token_ids.tolist()
    driver.feed(ev.TrainerReturned(batches=(2,)))
    assert [again.index for again in driver.state.delivery.batches_again] == [1]
    driver.feed(ev.TrainerReturned(batches=(1, 2)))
    driver.request_batch()
    driver.finish(driver.attempts()[0], 1)
    assert [batch.index for batch in driver.batches] == [0, 1, 2, 3]
    assert len(driver.redelivered) == 2


STREAMED = SchedulerConfig(batch_groups=3, group_size=1)


def ids(batch: Batch) -> list[int]:
    return [group.group_id for group in batch.groups]


def streaming(groups: int) -> Driver:
    """A scheduler that has given this number of groups of its first streamed batch."""
    driver = Driver(STREAMED, store=MemoryStore())
    driver.feed(ev.BatchRequested(streamed=True))
    driver.finish_groups(driver.group_ids()[:groups])
    driver.save()
    return driver


def test_a_trainer_with_some_groups_of_a_batch_gets_the_others_after_a_restart():
    driver = streaming(2)
    had = [group for part in driver.offers for group in ids(part)]
    driver.restart()
    driver.feed(ev.TrainerReturned(batches=(), groups=tuple(had)))
    driver.feed(ev.BatchRequested(streamed=True))
    assert len(driver.offers) == 2
    driver.finish_group(next(each for each in driver.group_ids() if each not in had))
    last = driver.offers[-1]
    assert last.complete
    assert len(ids(last)) == 1
    assert sorted([*had, *ids(last)]) == sorted(ids(driver.batches[0]))


def test_another_trainer_gets_a_batch_from_its_first_group():
    driver = streaming(2)
    had = [group for part in driver.offers for group in ids(part)]
    driver.feed(ev.TrainerReturned(batches=()))
    driver.feed(ev.BatchRequested(streamed=True))
    assert [group for part in driver.offers[2:] for group in ids(part)] == had
    assert not driver.batches


@pytest.mark.parametrize("has", [[0], [2], [0, 2], [1, 2]])
def test_a_trainer_with_some_groups_of_a_delivered_batch_gets_the_others(has: list[int]):
    """The scheduler has taken the last group for delivered, and the trainer does not have it, or
    another one."""
    driver = streaming(3)
    whole = ids(driver.batches[0])
    driver.restart()
    driver.feed(ev.TrainerReturned(batches=(), groups=tuple(whole[place] for place in has)))
    offered = len(driver.offers)
    driver.feed(ev.BatchRequested(streamed=True))
    again = driver.offers[offered:]
    assert [part.complete for part in again] == [False] * (len(again) - 1) + [True]
    found = [group for part in again for group in ids(part)]
    assert found == [group for place, group in enumerate(whole) if place not in has]


def test_a_batch_that_an_update_has_ended_is_not_given_again_to_who_has_its_groups():
    driver = streaming(2)
    had = [group for part in driver.offers for group in ids(part)]
    driver.feed(ev.UpdateRequested(version=1))
    driver.settle()
    driver.save()
    driver.restart()
    driver.feed(ev.TrainerReturned(batches=(), groups=tuple(had)))
    assert not driver.state.delivery.redelivery
    assert 0 in driver.state.delivery.unacknowledged


def test_a_whole_batch_after_some_groups_of_one_given_again_has_the_others():
    driver = streaming(3)
    whole = ids(driver.batches[0])
    driver.restart()
    driver.takes = False
    taken: list[Batch] = []
    for streamed in (True, True, False):
        driver.feed(ev.BatchRequested(streamed=streamed))
        taken.append(driver.offers[-1])
        driver.take()
    assert [ids(part) for part in taken] == [[group] for group in whole]
    assert [part.complete for part in taken] == [False, False, True]
    assert all(part.redelivered for part in taken)


@pytest.mark.parametrize("by_group", [False, True])
def test_groups_of_a_batch_in_work_come_again_marked(by_group: bool):
    """The process was killed before the batch was a whole one: its first groups are with the
    trainer, which may have trained on them."""
    driver = streaming(2)
    had = [group for part in driver.offers for group in ids(part)]
    driver.restart()
    offered = len(driver.offers)
    driver.feed(ev.BatchRequested(streamed=by_group))
    driver.finish_group(next(each for each in driver.group_ids() if each not in had))
    parts = driver.offers[offered:]
    assert [group for part in parts for group in ids(part)][:2] == had
    assert [part.redelivered for part in parts] == [True] * len(parts)
    driver.settle()
    driver.feed(ev.BatchRequested(streamed=by_group))
    driver.settle()
    driver.finish_groups(driver.group_ids())
    assert driver.offers[-1].index == 1
    assert not driver.offers[-1].redelivered


def test_a_streamed_batch_that_ended_early_is_saved_before_it_can_be_forgotten():
    driver = streaming(2)
    had = [group for part in driver.offers for group in ids(part)]
    (deliver,) = (
        command for command in driver.feed(ev.BatchRequested()) if isinstance(command, do.Deliver)
    )
    assert deliver.unsaved
    assert ids(deliver.batch) == had
