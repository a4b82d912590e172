"""Tests rollouts of several turns in the core: an interrupted request resumes in its turn."""

from __future__ import annotations

import numpy as np

from aprilsched.config import SchedulerConfig
from aprilsched.core.messages import events as ev
from aprilsched.types import NO_VERSION, Int32Array, Score
from tests.support.driver import Driver


def start() -> Driver:
    config = SchedulerConfig(
        batch_groups=1, group_size=1, over_provision=1.0, straggler="abort", pace="asynchronous"
    )
    driver = Driver(config, episodes=True)
    driver.feed(ev.BatchRequested())
    return driver


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def test_two_turns_each_interrupted_make_one_rollout():
    driver = start()
    rollout_id = driver.episodes_started[0].rollout_id
    driver.feed(ev.TurnRequested(rollout_id=rollout_id, input_ids=ids(1, 2, 3)))
    driver.progress(driver.attempts()[0], 2, first=10)
    driver.update()
    driver.finish(driver.attempts()[0], 0)
    assert driver.resolved[0].token_ids.tolist() == [10, 11]
    assert driver.resolved[0].versions.tolist() == [0, 0]
    driver.feed(ev.TurnRequested(rollout_id=rollout_id, input_ids=ids(1, 2, 3, 10, 11, 50, 51)))
    driver.progress(driver.attempts()[0], 1, first=20)
    driver.update()
    assert driver.sends[driver.attempts()[0]].input_ids.tolist() == [1, 2, 3, 10, 11, 50, 51, 20]
    driver.progress(driver.attempts()[0], 1, first=21)
    driver.finish(driver.attempts()[0], 0)
    driver.feed(ev.EpisodeFinished(rollout_id=rollout_id, score=Score(reward=0.5)))
    (rollout,) = driver.batches[0].rollouts
    assert rollout.token_ids.tolist() == [10, 11, 50, 51, 20, 21]
    assert rollout.versions.tolist() == [0, 0, NO_VERSION, NO_VERSION, 1, 2]
    assert rollout.loss_mask.tolist() == [True, True, False, False, True, True]
    assert (rollout.turns, rollout.reward) == (2, 0.5)


def test_an_episode_that_raises_is_in_the_ledger():
    driver = start()
    driver.feed(
        ev.EpisodeFailed(rollout_id=driver.episodes_started[0].rollout_id, cause="KeyError")
    )
    assert driver.state.in_flight.ledger.rollouts == {"episode_failed": 1}


def test_an_episode_that_generates_nothing_has_failed():
    driver = start()
    driver.feed(
        ev.EpisodeFinished(
            rollout_id=driver.episodes_started[0].rollout_id, score=Score(reward=1.0)
        )
    )
    assert driver.state.in_flight.ledger.rollouts == {"episode_failed": 1}
