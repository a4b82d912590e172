"""Tests the delivery of single samples: siblings, baselines, losses, staleness and restarts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprilsched import Group, Prompt, RolloutScheduler, SimFleet, Turn
from aprilsched.config import Pool, Retries, SchedulerConfig, Staleness, Tokens
from aprilsched.errors import ConfigError, PromptsExhausted
from aprilsched.kernel.core.config import MemberRule
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages.facts import BatchDelivered, Fact
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.steps.snapshot import take_checkpoint
from aprilsched.kernel.store import MemoryStore
from aprilsched.simulation import simulate
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.types import Batch, Sample, Score
from tests.support.driver import Driver, Key, prompts
from tests.support.table import each_row


def config(siblings: int | None = 2, **changes: object) -> SchedulerConfig:
    values: dict[str, object] = {
        "batch_groups": 1,
        "group_size": 4,
        "over_provision": 1.0,
        "delivery": "samples",
        "siblings": siblings,
    }
    return SchedulerConfig(**{k: v for k, v in {**values, **changes}.items() if v is not None})  # type: ignore[arg-type]


def driver_of(settings: SchedulerConfig, **changes: object) -> Driver:
    """A driver whose trainer has requested a batch, with a reward function."""
    driver = Driver(settings, **{"reward_scope": "rollout", **changes})  # type: ignore[arg-type]
    driver.request_batch()
    return driver


def finish(driver: Driver, index: int, length: int = 3, reward: float | None = 0.0) -> None:
    """The member `index` of the oldest group ends, and gets its reward unless that is None."""
    group_id = driver.group_ids()[0]
    key = next(k for k in driver.attempts(group_id) if _index(driver, driver.sends[k]) == index)
    driver.finish(key, length)
    if reward is not None:
        score(driver, reward)


def _index(driver: Driver, send: object) -> int:
    return driver.state.in_flight.rollouts[send.rollout_id].index  # type: ignore[attr-defined]


def score(driver: Driver, reward: float, place: int = 0) -> None:
    rollout = driver.scores.pop(place).rollout
    driver.feed(ev.Rewarded(rollout_id=rollout.rollout_id, score=Score(reward=reward)))


def finish_and_score(driver: Driver, keys: Sequence[Key]) -> None:
    for key in keys:
        driver.finish(key)
        score(driver, 1.0)


def accept(driver: Driver) -> None:
    """Accept everything that waits for its verdict."""
    verdicts, driver.verdicts = driver.verdicts, []
    for verdict in verdicts:
        driver.feed(ev.Filtered(group_id=verdict.unit.unit_id, accepted=True))


def ready(driver: Driver) -> list[int]:
    """The indexes of the samples that may be delivered, in order."""
    return [unit.members[0].index for unit in driver.state.in_flight.ready]


def siblings(batch: Batch) -> dict[int, tuple[int, ...]]:
    return {s.rollout.index: tuple(each.index for each in s.siblings) for s in batch.samples}


# --- who are the siblings ------------------------------------------------------------------------


def test_a_sample_waits_for_two_others_and_has_the_first_ones_to_end():
    driver = driver_of(config())
    finish(driver, 2)
    finish(driver, 0)
    assert ready(driver) == []
    finish(driver, 3)
    assert ready(driver) == [0, 2, 3]
    finish(driver, 1)
    (batch,) = driver.batches
    assert siblings(batch) == {0: (2, 3), 2: (0, 3), 3: (2, 0), 1: (2, 0)}
    assert not any(sample.few for sample in batch.samples)


def test_the_order_is_that_of_generation_and_not_of_rewards():
    driver = driver_of(config())
    for index in (0, 1, 2):
        finish(driver, index, reward=None)
    score(driver, 0.0, 2)
    score(driver, 0.0, 1)
    assert ready(driver) == [], "the first to end is not scored"
    score(driver, 0.0)
    finish(driver, 3)
    assert siblings(driver.batches[0]) == {0: (1, 2), 1: (0, 2), 2: (0, 1), 3: (0, 1)}


@dataclass(frozen=True)
class Story:
    """What happens to the other members of a group, in order, and to the one that changes."""

    siblings: int
    member: MemberRule
    events: list[tuple[int, str]]

    @staticmethod
    @st.composite
    def drawn(draw: st.DrawFn) -> Story:
        ends = st.sampled_from([("end", "score"), ("end", "fail"), ("lose", "end", "score")])
        lives = {index: list(draw(ends)) for index in range(1, SIZE)}
        order = draw(st.permutations([i for i, life in lives.items() for _ in life]))
        events = [(index, lives[index].pop(0)) for index in order]
        for place in draw(st.lists(st.integers(0, len(events)), max_size=2)):
            events.insert(place, (0, "restart"))
        siblings = draw(st.integers(1, SIZE - 1))
        return Story(siblings, draw(st.sampled_from(["again", "shrink"])), events)

    def siblings_of_the_changed(self, ends: int, scored: int, reward: float) -> list[object]:
        """Return the siblings of member 0, which ends before event `ends` of the others, and has
        its reward before event `scored` of them."""
        retries = Retries(attempts=1, member=self.member, smallest_group=1)
        settings = config(self.siblings, group_size=SIZE, batch_groups=2, retries=retries)
        driver = driver_of(settings, store=MemoryStore())
        for place in range(len(self.events) + 1):
            if place == ends:
                finish(driver, 0, 1 + ends, reward=None)
            if place == max(ends, scored):
                score_member(driver, 0, reward)
            for event in self.events[place : place + 1]:
                tell(driver, *event)
        (own,) = [unit for unit in driver.state.in_flight.ready if unit.members[0].index == 0]
        return [(each.index, each.reward) for each in own.siblings]


SIZE = 5
"""Members of a group of a story."""


def tell(driver: Driver, index: int, what: str) -> None:
    """Let something happen to a member of the oldest group, unless it has left."""
    group_id = min(driver.state.in_flight.groups)
    keys = [key for key in driver.attempts(group_id) if _index(driver, driver.sends[key]) == index]
    if what == "restart":
        driver.save()
        driver.restart()
        driver.request_batch()
    elif what == "end" and keys:
        driver.finish(keys[0], 3)
    elif what == "lose":
        driver.fail(keys[0], cause="HTTP 500")
    elif what == "score":
        score_member(driver, index, index / 10)
    elif what == "fail":
        score_member(driver, index, None)


def score_member(driver: Driver, index: int, reward: float | None) -> None:
    """Answer the request for the reward of a member of the oldest group, if there is one."""
    group_id = min(driver.state.in_flight.groups)
    for place, each in enumerate(driver.scores):
        rollout = each.rollout
        if (rollout.group_id, rollout.index) == (group_id, index):
            del driver.scores[place]
            if reward is not None:
                score = Score(reward=reward)
                driver.feed(ev.Rewarded(rollout_id=rollout.rollout_id, score=score))
            else:
                failure = ev.RewardFailed(
                    group_id=group_id, cause="a bug", rollout_id=rollout.rollout_id
                )
                driver.feed(failure)
            return


@settings(max_examples=60, deadline=None)
@given(story=Story.drawn(), places=st.lists(st.integers(0, 20), min_size=4, max_size=4))
def test_neither_length_nor_reward_of_a_sample_changes_its_own_siblings(
    story: Story, places: list[int]
):
    """The others' events are replayed: they end, fail, are lost, and the process restarts."""
    ends, scored, other_ends, other_scored = (place % (len(story.events) + 1) for place in places)
    siblings = story.siblings_of_the_changed(ends, scored, 0.0)
    assert siblings == story.siblings_of_the_changed(other_ends, other_scored, 1.0)


def test_half_of_the_group_is_the_default():
    assert config(siblings=None).policies.siblings == 2


# --- the gradient --------------------------------------------------------------------------------

P, REWARDS, LENGTHS = 0.3, (0.2, 1.0), (10, 50)
"""Probability of action 1, and the reward and response length of each action."""


def first_siblings(sample: Sample, _: Sequence[int]) -> list[int]:
    return [each.index for each in sample.siblings]


def all_that_have_ended(sample: Sample, order: Sequence[int]) -> list[int]:
    """The naive rule: all others that have ended when the sample and two others have."""
    place = max(order.index(sample.rollout.index), 2)
    return [index for index in order[: place + 1] if index != sample.rollout.index]


@each_row(
    ("baseline", "exact"),
    [(first_siblings, True), (all_that_have_ended, False)],
    ids=["the first siblings", "all that have ended"],
)
def test_the_gradient_is_exact_over_all_outcomes(
    baseline: Callable[[Sample, Sequence[int]], list[int]], exact: bool
):
    """The expectation over all actions of a group, for a policy of one logit.

    The policy gradient of the reward is p (1 - p) (r1 - r0) for each member. The estimate of a
    sample is (a - p) (r - b), where b is the mean reward of the chosen members. Ties of the length
    are broken in all orders.
    """
    found, orders = 0.0, list(permutations(range(4)))[::5]
    for actions in product((0, 1), repeat=4):
        weight = P ** sum(actions) * (1 - P) ** (4 - sum(actions))
        for tie in orders:
            order = sorted(range(4), key=lambda i: (LENGTHS[actions[i]], tie.index(i)))
            driver = driver_of(config())
            for index in order:
                finish(driver, index, LENGTHS[actions[index]], REWARDS[actions[index]])
            for sample in driver.batches[0].samples:
                action = actions[sample.rollout.index]
                rewards = [REWARDS[actions[i]] for i in baseline(sample, order)]
                gap = REWARDS[action] - sum(rewards) / len(rewards)
                found += weight * (action - P) * gap / len(orders)
    truth = 4 * P * (1 - P) * (REWARDS[1] - REWARDS[0])
    assert (abs(found - truth) < 1e-12) is exact
    assert exact or found < 0.97 * truth


# --- batches -------------------------------------------------------------------------------------


def test_a_batch_takes_samples_and_the_rest_of_a_group_comes_later():
    driver = driver_of(config(siblings=1, over_provision=2.0))
    groups = driver.group_ids()
    for group_id in groups:
        for key in driver.attempts(group_id)[:2]:
            driver.finish(key)
            score(driver, 1.0)
    (batch,) = driver.batches
    assert [sample.group_id for sample in batch.samples] == [groups[0]] * 2 + [groups[1]] * 2
    driver.request_batch()
    while len(driver.batches) < 2:
        driver.finish(driver.attempts()[0])
        score(driver, 1.0)
    ids = [sample.unit_id for each in driver.batches for sample in each.samples]
    assert len(set(ids)) == len(ids) == 8


def test_a_member_that_never_ends_costs_one_sample():
    driver = driver_of(config(batch_groups=2, over_provision=1.5))
    never = driver.attempts(driver.group_ids()[0])[0]
    for _ in range(3):
        while not driver.batches:
            driver.finish(next(key for key in driver.attempts() if key != never))
            score(driver, 1.0)
        driver.batches.clear()
        driver.update()
        driver.request_batch()
    assert never in driver.sends


def test_a_batch_says_what_it_is_made_of():
    driver = driver_of(config())
    for index in range(4):
        finish(driver, index)
    with pytest.raises(ConfigError, match=r"use batch\.samples"):
        _ = driver.batches[0].groups
    groups = driver_of(config(delivery="groups", siblings=None))
    for index in range(4):
        finish(groups, index)
    with pytest.raises(ConfigError, match=r"use batch\.groups"):
        _ = groups.batches[0].samples


@each_row(
    ("changes", "text"),
    [
        ({"siblings": 4}, "siblings must be below group_size=4"),
        ({"delivery": "groups"}, "siblings is 2 with delivery"),
        ({"refill": "buckets"}, 'refill="buckets" runs or defers a whole group'),
        ({"refill": "tail"}, 'refill="tail" runs or defers a whole group'),
    ],
)
def test_settings_that_samples_refuse(changes: dict[str, object], text: str):
    with pytest.raises(ConfigError, match=text):
        config(**changes)  # type: ignore[arg-type]


def no_rewards(group: Group) -> list[float]:
    return []


async def no_turns(turn: Turn, prompt: Prompt) -> None:
    return None


@each_row(
    ("reward", "scope", "episode"),
    [(None, "rollout", None), (no_rewards, "group", None), (no_rewards, "group", no_turns)],
    ids=["no reward", "group rewards", "group rewards of episodes"],
)
def test_rewards_that_samples_refuse(reward: Any, scope: Any, episode: Any):
    parts: dict[str, Any] = {"reward": reward, "reward_scope": scope, "episode": episode}
    with pytest.raises(ConfigError, match="needs the reward of each rollout by itself"):
        RolloutScheduler(SimFleet(1), (), config=config(), **parts)


def test_tokens_may_fill_a_batch_of_samples():
    driver = driver_of(config(stop=Tokens(10), siblings=1))
    for index in (0, 1, 2):
        finish(driver, index, 4)
    assert [len(batch.samples) for batch in driver.batches] == [3]


def test_an_evaluation_returns_whole_groups():
    driver = driver_of(config())
    driver.feed(ev.EvaluationRequested(evaluation_id=1, prompts=prompts(1), group_size=3))
    while 1 not in driver.evaluations:
        driver.finish(driver.attempts()[0])
        score(driver, 1.0)
    (group,) = driver.evaluations[1].groups
    assert [rollout.index for rollout in group.rollouts] == [0, 1, 2]


# --- losses --------------------------------------------------------------------------------------


def test_a_reward_that_fails_costs_its_member_alone():
    driver = driver_of(config(batch_groups=1, over_provision=2.0))
    first = driver.group_ids()[0]
    for index in range(3):
        finish(driver, index, reward=None)
    failed = driver.scores.pop(0).rollout
    failure = ev.RewardFailed(group_id=first, cause="a bug", rollout_id=failed.rollout_id)
    driver.feed(failure)
    score(driver, 1.0)
    score(driver, 1.0)
    assert ready(driver) == [], "the two others have one sibling each until the last one ends"
    finish(driver, 3)
    assert ready(driver) == [1, 2, 3]
    assert driver.state.in_flight.ledger.rollouts == {Reason.REWARD_FAILED: 1}


def test_a_run_is_given_up_after_as_many_samples():
    driver = driver_of(config(retries=Retries(failed_groups=2)))
    for index in (0, 1):
        finish(driver, index, reward=None)
        failed = driver.scores.pop().rollout
        driver.feed(
            ev.RewardFailed(group_id=failed.group_id, cause="a bug", rollout_id=failed.rollout_id)
        )
    (given_up,) = driver.given_up
    assert "2 samples in a row failed" in str(given_up.error)


def test_a_prompt_fails_only_if_nothing_of_it_is_left():
    """A failed reward of each prompt is a quarter of the samples and not all of the prompts."""
    driver = driver_of(config(siblings=1), supply=3)
    while not driver.ended:
        if driver.sends:
            finish(driver, min(_index(driver, send) for send in driver.sends.values()), reward=None)
            failed = driver.scores[0].rollout
            if failed.index == 3:
                driver.scores.clear()
                driver.feed(
                    ev.RewardFailed(
                        group_id=failed.group_id, cause="a bug", rollout_id=failed.rollout_id
                    )
                )
            else:
                score(driver, 1.0)
        driver.request_batch()
    assert isinstance(driver.end, PromptsExhausted)
    assert driver.end.failed == 0


def test_a_group_that_shrinks_says_that_there_are_fewer_siblings():
    settings = config(siblings=3, retries=Retries(attempts=1, member="shrink"))
    driver = driver_of(settings, reward_scope="rollout")
    for index in (0, 1, 2):
        finish(driver, index)
    driver.fail(driver.attempts()[0], cause="HTTP 500")
    units = list(driver.state.in_flight.ready)
    assert [len(unit.siblings) for unit in units] == [2, 2, 2]
    assert all(unit.few for unit in units)


def test_a_withdrawn_group_takes_its_samples_along():
    driver = driver_of(config(batch_groups=2, siblings=1))
    group_id = driver.group_ids()[0]
    finish(driver, 0)
    finish(driver, 1)
    driver.feed(ev.GroupWithdrawn(group_id=group_id, cause="the client has left"))
    assert ready(driver) == []
    assert driver.state.in_flight.ledger.rollouts == {Reason.WITHDRAWN: 4}


def test_each_sample_is_filtered_with_its_siblings():
    driver = driver_of(config(siblings=1), accepts=True)
    finish(driver, 0, reward=1.0)
    finish(driver, 1, reward=0.0)
    first, second = (verdict.unit for verdict in driver.verdicts)
    assert isinstance(first, Sample)
    assert [each.reward for each in first.siblings] == [0.0]
    driver.feed(ev.Filtered(group_id=first.unit_id, accepted=False))
    driver.feed(ev.Filtered(group_id=second.unit_id, accepted=True))
    assert ready(driver) == [1]
    assert driver.state.in_flight.ledger.rollouts == {Reason.REJECTED: 1}


# --- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", ["groups", "samples"])
def test_a_pool_counts_running_responses(delivery: str):
    """The finished members of open groups are replaced, whichever groups they belong to."""
    siblings = 3 if delivery == "samples" else None
    settings = config(siblings, delivery=delivery, batch_groups=2, refill=Pool(together=1))
    driver = driver_of(settings)
    assert len(driver.attempts()) == 8
    for group_id in driver.group_ids():
        for key in driver.attempts(group_id)[:2]:
            driver.finish(key)
    assert not ready(driver)
    assert len(driver.group_ids()) == 3
    assert len(driver.attempts()) == 8


def test_a_plan_has_each_response_once_in_the_order_of_its_group():
    """In the order of their ends the first response of a group would be its shortest one."""
    driver = driver_of(
        config(siblings=1, over_provision="auto", straggler="in_place"), reward_scope="none"
    )
    first, second = driver.group_ids()
    for index, length in ((2, 3), (1, 5), (0, 8)):
        finish(driver, index, length, reward=None)
    assert ready(driver) == [1, 2, 0]
    driver.progress(driver.attempts(first)[0], 9)
    driver.finish(driver.attempts(second)[0], 7)
    driver.finish(driver.attempts(second)[1], 4)
    assert len(driver.batches) == 1, "four samples"
    assert driver.plans == [], "no group has ended"
    driver.update()
    driver.request_batch()
    driver.finish(driver.attempts(first)[0], 2)
    while len(driver.batches) < 2:
        driver.finish(driver.attempts()[0], 6)
    (plan,) = driver.plans
    groups = {group.launched: group.tokens.tolist() for group in (*plan.ended, *plan.open)}
    assert len(groups) == len(plan.ended) + len(plan.open)
    assert groups[first] == [8, 5, 3, 11]
    assert groups[second] == [7, 6, 4, 6]
    assert driver.state.expectations.prompt_tokens == 2.0
    most = driver.config.sampling.max_new_tokens
    lengths = [len(s.rollout.token_ids) for batch in driver.batches for s in batch.samples]
    spare = most - sum(lengths) / len(lengths)
    assert driver.state.expectations.spare_tokens == pytest.approx(spare)


def test_a_plan_has_a_complete_group_in_flight_once():
    settings = config(None, delivery="groups", over_provision="auto", straggler="in_place")
    driver = driver_of(settings)
    launched = driver.group_ids()[:2]
    for group_id in launched:
        for key in driver.attempts(group_id):
            driver.finish(key)
    for _ in range(4):
        score(driver, 1.0)
    assert len(driver.batches) == 1
    driver.request_batch()
    (plan,) = driver.plans
    assert [group.launched for group in plan.ended] == launched


def test_a_random_batch_of_samples_has_whole_groups():
    """Without over-provisioning both deliveries put the same responses into a batch."""
    found: dict[str, list[tuple[float, float]]] = {}
    for delivery in ("groups", "samples"):
        seen = Distances()
        settings = SchedulerConfig(batch_groups=8, over_provision=1.0, delivery=delivery)
        simulate(LongTailWorkload(), settings, batches=4, usage=False, listeners=[seen])
        found[delivery] = seen.of_batches
    assert len(found["samples"]) == 4
    for (distance, usual), (other, other_usual) in zip(*found.values(), strict=True):
        assert distance == pytest.approx(other)
        assert usual == pytest.approx(other_usual, rel=0.3)


class Distances:
    """Listens to the distances of batches from the distribution of lengths."""

    def __init__(self) -> None:
        self.of_batches: list[tuple[float, float]] = []

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, BatchDelivered):
                self.of_batches.append((fact.distance or 0.0, fact.iid_distance or 0.0))


# --- staleness -----------------------------------------------------------------------------------


def test_only_the_stale_samples_are_evicted():
    stale = Staleness(1, rule="evict")
    driver = driver_of(config(siblings=1, over_provision=2.0, max_staleness=stale))
    first, second = driver.group_ids()
    old = driver.attempts(second)[3]
    driver.progress(old, 2)
    for group_id in (first, second):
        for key in driver.attempts(group_id)[:2]:
            driver.finish(key)
            score(driver, 1.0)
    assert [len(batch.samples) for batch in driver.batches] == [4]
    driver.update()
    driver.update()
    assert driver.state.in_flight.ledger.rollouts == {Reason.STALE: 1}
    assert driver.state.in_flight.groups[second].size == 3


def test_a_scored_member_that_is_evicted_stays_a_sibling():
    stale = Staleness(0, rule="evict")
    driver = driver_of(config(siblings=2, max_staleness=stale), store=MemoryStore())
    keys = driver.attempts()
    for key in keys[:2]:
        driver.progress(key, 2)
        driver.finish(key)
        score(driver, 1.0)
    driver.save()
    driver.update()
    assert driver.state.in_flight.ledger.rollouts == {Reason.STALE: 2}
    driver.save()
    driver.restart()
    driver.request_batch()
    for index in (2, 3):
        finish(driver, index)
    found = [[each.index for each in unit.siblings] for unit in driver.state.in_flight.ready]
    assert found == [[0, 1], [0, 1]]


def test_a_stale_member_evicts_a_group_that_becomes_too_small():
    settings = config(group_size=2, siblings=1, max_staleness=Staleness(0, rule="evict"))
    driver = driver_of(settings)
    for key in driver.attempts():
        driver.progress(key, 2)
    driver.update()
    counts = {Reason.STALE: 1, Reason.SIBLING_FAILED: 1}
    assert driver.state.in_flight.ledger.rollouts == counts


@each_row("killed", [False, True], ids=["", "killed"])
def test_samples_and_members_that_restart_are_generated_again(killed: bool):
    stale = Staleness(0, rule="restart")
    driver = driver_of(config(siblings=1, max_staleness=stale), store=MemoryStore())
    finish(driver, 0)
    finish(driver, 1)
    assert ready(driver) == [0, 1]
    driver.progress(driver.attempts()[0], 2)
    driver.save()
    driver.update()
    if killed:
        driver.save()
        driver.restart()
        driver.request_batch()
    assert driver.state.in_flight.ledger.rollouts == {Reason.BEGUN_AGAIN: 3}
    while not driver.batches:
        driver.finish(driver.attempts()[0])
        score(driver, 1.0)
    (batch,) = driver.batches
    assert sorted(sample.rollout.index for sample in batch.samples) == [0, 1, 2, 3]
    assert {int(v) for sample in batch.samples for v in sample.rollout.versions} == {1}
    assert driver.state.in_flight.counters.regenerated == 0


def test_a_batch_waits_for_the_verdict_on_a_sample_that_is_due():
    stale = Staleness(1, rule="finish")
    settings = config(siblings=1, over_provision=2.0, max_staleness=stale)
    driver = driver_of(settings, accepts=True)
    first, second = driver.group_ids()
    due = driver.attempts(second)[:2]
    driver.progress_each(due, 2)
    finish_and_score(driver, driver.attempts(first))
    accept(driver)
    driver.update()
    driver.request_batch()
    finish_and_score(driver, due)
    late, driver.verdicts = driver.verdicts, []
    finish_and_score(driver, driver.attempts())
    accept(driver)
    assert len(driver.batches) == 1, "the batch is full, and two samples are due"
    driver.verdicts = late
    accept(driver)
    delivered = {sample.unit_id for sample in driver.batches[1].samples}
    assert {verdict.unit.unit_id for verdict in late} <= delivered


# --- restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [1, 2, 3])
def test_a_restart_changes_no_siblings(ended: int):
    """The process ends after some members have ended; siblings are those of a run without it."""
    order = (2, 0, 3, 1)
    found: list[dict[int, tuple[int, ...]]] = []
    for restarts in (False, True):
        driver = driver_of(config(), store=MemoryStore())
        for index in order[:ended]:
            finish(driver, index)
        if restarts:
            driver.save()
            driver.restart()
            driver.request_batch()
        for index in order[ended:]:
            finish(driver, index)
        found.append(siblings(driver.batches[0]))
    assert found[0] == found[1]


def test_a_run_continues_only_with_the_same_delivery():
    driver = driver_of(config(), store=MemoryStore())
    finish(driver, 0)
    driver.save()
    driver.config = config(delivery="groups", siblings=None)
    with pytest.raises(ConfigError, match='the saved run has delivery="samples"'):
        driver.restart()


@each_row("full", [False, True], ids=["changes", "checkpoint"])
def test_a_group_that_has_no_member_left_survives_a_restart(full: bool):
    """All of its samples wait for the batch; what restarts is generated again in its place."""
    stale = Staleness(0, rule="restart")
    driver = driver_of(config(batch_groups=2, siblings=1, max_staleness=stale), store=MemoryStore())
    for index in range(4):
        finish(driver, index)
    assert ready(driver) == [0, 1, 2, 3]
    driver.save()
    if full:
        assert driver.store is not None
        driver.store.save(take_checkpoint(driver.state, without=()), durable=True)
    driver.restart()
    assert ready(driver) == [0, 1, 2, 3]
    driver.request_batch()
    driver.update()
    assert driver.state.in_flight.ledger.rollouts == {Reason.BEGUN_AGAIN: 4}
    while not driver.batches:
        driver.finish(driver.attempts()[0])
        score(driver, 1.0)
    assert len(driver.batches[0].samples) == 8


def test_a_batch_is_delivered_again_with_all_its_samples():
    """Also if its members were saved while they were in their group, which has left since."""
    driver = driver_of(config(), store=MemoryStore())
    for index in (2, 0):
        finish(driver, index)
    driver.save()
    for index in (3, 1):
        finish(driver, index)
    (batch,) = driver.batches
    driver.save()
    driver.restart()
    driver.request_batch()
    (again,) = driver.redelivered
    assert siblings(again) == siblings(batch)
    assert [r.token_ids.tolist() for r in again.rollouts] == [
        r.token_ids.tolist() for r in batch.rollouts
    ]
