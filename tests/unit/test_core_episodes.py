"""Tests rollouts of several turns in the core: an interrupted request resumes in its turn."""

from __future__ import annotations

import numpy as np
import pytest

from aprilsched.config import Dispatch, SchedulerConfig
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.kinds import RefillRule
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.types import NO_VERSION, BranchRule, Int32Array, Prompt, Score
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


def test_a_refused_turn_is_an_error_and_its_episode_continues():
    driver = Driver(
        SchedulerConfig(batch_groups=1, group_size=2, over_provision=1.0, pace="asynchronous"),
        episodes=True,
        engines=("a",),
    )
    driver.feed(ev.BatchRequested())
    for started in driver.episodes_started:
        driver.feed(ev.TurnRequested(rollout_id=started.rollout_id, input_ids=ids(1, 2)))
        driver.progress(driver.attempts()[0], 1, first=10)
        driver.finish(driver.attempts()[0], 0)
    rollout_id = driver.episodes_started[-1].rollout_id
    context = ids(1, 2, 10, *range(50, 80))
    driver.feed(ev.TurnRequested(rollout_id=rollout_id, input_ids=context))
    driver.progress(driver.attempts()[0], 2)
    driver.interrupt(driver.attempts()[0])
    driver.fail(driver.attempts()[0], cause="a: too long", final=True)
    refused = driver.resolved[-1]
    assert (refused.rollout_id, refused.refused, refused.token_ids.tolist()) == (
        rollout_id,
        "too long",
        [],
    )
    state = driver.state.in_flight
    assert (state.counters.turns_refused, state.ledger.total) == (1, 0)
    assert state.ledger.tokens == {Reason.FAILED: 2}, "what had come of it before"
    # An episode that was cancelled in the same moment gets nothing of the turn before.
    driver.dialogues.withdrawn[rollout_id] = context
    driver.feed(ev.TurnWithdrawn(rollout_id=rollout_id))
    assert driver.resolved[-1].withdrawn
    assert not len(driver.resolved[-1].token_ids)
    driver.feed(ev.TurnRequested(rollout_id=rollout_id, input_ids=ids(1, 2, 10, 50)))
    driver.progress(driver.attempts()[0], 1, first=20)
    driver.finish(driver.attempts()[0], 0)
    for started in driver.episodes_started:
        driver.feed(ev.EpisodeFinished(rollout_id=started.rollout_id, score=Score(reward=1.0)))
    one, two = driver.batches[0].rollouts
    assert one.token_ids.tolist() == [10]
    assert two.token_ids.tolist() == [10, 50, 20]
    assert two.loss_mask.tolist() == [True, False, True]


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


def branched(rule: BranchRule) -> Driver:
    """An episode asks for four turns, with a refit after each: two of one context, one that leaves
    it in the middle of the first response, and one with another prompt."""
    driver = start()
    rollout_id = driver.episodes_started[0].rollout_id
    for context, count, first in (
        (ids(1, 2, 3), 4, 10),
        (ids(1, 2, 3, 10, 11, 12, 13, 50), 2, 20),
        (ids(1, 2, 3, 10, 11, 60), 3, 30),
        (ids(1, 7), 1, 40),
    ):
        driver.feed(ev.TurnRequested(rollout_id=rollout_id, input_ids=context, branch=True))
        assert driver.sends[driver.attempts()[0]].input_ids.tolist() == context.tolist()
        driver.progress(driver.attempts()[0], count, first=first)
        driver.update()
        driver.finish(driver.attempts()[0], 0)
    driver.feed(ev.EpisodeFinished(rollout_id=rollout_id, score=Score(reward=0.5), branches=rule))
    return driver


@pytest.mark.parametrize(
    ("rule", "prompt", "tokens", "versions", "turns"),
    [
        ("last", [1, 7], [40], [3], 1),
        ("longest", [1, 2, 3], [10, 11, 12, 13, 50, 20, 21], [0, 0, 0, 0, -1, 1, 1], 2),
        ("all", [1, 2, 3], [10, 11, 12, 13, 50, 20, 21], [0, 0, 0, 0, -1, 1, 1], 4),
    ],
)
def test_a_rule_selects_the_branches_to_deliver(
    rule: BranchRule, prompt: list[int], tokens: list[int], versions: list[int], turns: int
):
    driver = branched(rule)
    (rollout,) = driver.batches[0].rollouts
    assert rollout.prompt_ids.tolist() == prompt
    assert rollout.token_ids.tolist() == tokens
    assert rollout.versions.tolist() == versions
    assert (rollout.turns, rollout.reward, rollout.shared) == (turns, 0.5, 0)
    in_flight = driver.state.in_flight
    sampled = sum(int(each.loss_mask.sum()) for each in (rollout, *rollout.branches))
    assert in_flight.counters.tokens_delivered == sampled
    assert in_flight.ledger.tokens[Reason.OTHER_BRANCH] == 10 - sampled
    assert in_flight.counters.tokens_generated == 10


def test_tokens_that_branches_share_are_trained_once():
    (rollout,) = branched("all").batches[0].rollouts
    middle, other = rollout.branches
    assert middle.token_ids.tolist() == [10, 11, 60, 30, 31, 32]
    assert middle.versions.tolist() == [0, 0, NO_VERSION, 2, 2, 2]
    assert middle.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert (middle.shared, other.shared) == (2, 0)
    assert (other.prompt_ids.tolist(), other.token_ids.tolist()) == ([1, 7], [40])
    pytest.importorskip("torch")
    batch = branched("all").batches[0]
    tensors = batch.to_torch()
    assert tensors.input_ids.shape == (3, 10)
    assert tensors.rewards.tolist() == [0.5] * 3
    assert int(tensors.loss_mask.sum()) == 10
    assert batch.tokens == 12


# --- places ------------------------------------------------------------------------------------


@pytest.mark.parametrize("refill", ["wave", "pool"])
def test_an_episode_at_its_tools_is_in_flight_and_holds_no_place(refill: RefillRule):
    """Over-provisioning counts it, so that no group is launched in its place, and another request
    has its place at the engine."""
    driver = Driver(
        SchedulerConfig(
            batch_groups=2, group_size=2, over_provision=1.5, refill=refill,
            dispatch=Dispatch(max_in_flight=2),
        ),
        episodes=True,
    )  # fmt: skip
    driver.feed(ev.BatchRequested())
    launched = list(driver.dialogues.thinking)
    assert len(launched) == 6
    for rollout_id in launched:
        driver.feed(driver.dialogues.ask(rollout_id))
    in_flight = driver.state.in_flight
    for answered in range(1, 5):
        at_engines = [driver.sends[key].rollout_id for key in driver.attempts()]
        assert at_engines == launched[answered - 1 : answered + 1]
        driver.finish(driver.attempts()[0], 1)
        assert len(driver.dialogues.thinking) == answered
        assert in_flight.generating == in_flight.counters.launched == 6


def test_a_turn_goes_to_the_engine_of_the_turn_before_unless_that_is_overloaded():
    """The group's last request was sent to the other engine, which has none of this context."""
    driver = Driver(
        SchedulerConfig(batch_groups=2, group_size=2, over_provision=1.0),
        engines=("a", "b"), episodes=True, auto_prompts=False,
    )  # fmt: skip
    driver.feed(ev.BatchRequested())
    crowd = Prompt(input_ids=ids(1, 2), group_size=10, affinity="crowd")
    driver.feed(ev.PromptsArrived(prompts=(Prompt(input_ids=ids(1, 2)), crowd)))
    first, second, *others = driver.dialogues.thinking

    def sent_to(rollout_id: int) -> str:
        driver.feed(driver.dialogues.ask(rollout_id))
        assert driver.sent[-1].rollout_id == rollout_id
        return driver.sent[-1].engine

    def turn_on(rollout_id: int) -> str:
        engine = sent_to(rollout_id)
        key = next(k for k in driver.attempts() if driver.sends[k].rollout_id == rollout_id)
        driver.finish(key, 3)
        return engine

    assert turn_on(first) == "a"
    assert {sent_to(other) for other in others[:6]} == {"a"}
    assert turn_on(second) == "b"
    assert turn_on(first) == "a", "6 more requests cost less than its context"
    assert turn_on(second) == "b"
    assert {sent_to(other) for other in others[6:]} == {"a"}
    assert turn_on(first) == "b", "10 more requests cost more than its context"
    assert turn_on(first) == "b", "its context is there now"
