"""Tests tail batching: which groups race, which are put aside, and when they run to their end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from aprilsched.config import LengthBuckets, SchedulerConfig, Staleness
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.lengths.log_lengths import LogLengths
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages.facts import Fact, GroupLaunched
from aprilsched.kernel.core.policies.refill import OpenGroups, PoolView
from aprilsched.kernel.core.policies.tail_batching import TailBatching
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import GroupRecord
from aprilsched.kernel.store import MemoryStore
from aprilsched.observe.log.lengths_of_run import Launches
from aprilsched.planning.presets import rollpacker
from aprilsched.types import Group
from tests.support.driver import Driver
from tests.support.table import each_row

RESTART = Staleness(0, rule="restart")


# --- the rule ------------------------------------------------------------------------------------


@each_row(
    ("wave_due", "batch_open", "open_groups", "put_aside", "ready", "launched"),
    [
        (True, True, 0, 0, 0, 10),
        (True, True, 6, 6, 0, 10),
        (True, True, 8, 8, 0, 0),
        (True, True, 9, 7, 0, 8),  # two were launched before and have not raced
        (True, True, 7, 7, 1, 0),  # one was complete before
        (False, True, 3, 0, 0, 0),
        (False, True, 0, 0, 6, 4),  # everything was rejected
        (False, False, 0, 0, 8, 0),
    ],
)
def test_a_race_is_launched_unless_a_batch_of_losers_is_there(
    wave_due: bool, batch_open: bool, open_groups: int, put_aside: int, ready: int, launched: int
) -> None:
    view = PoolView(
        batch_groups=8,
        group_size=2,
        target_groups=10,
        open_groups=open_groups,
        put_aside=put_aside,
        ready_groups=ready,
        in_flight=2 * open_groups,
        wave_due=wave_due,
        batch_open=batch_open,
        asynchronous=False,
    )
    assert TailBatching().launches(view) == launched


@each_row(
    ("since", "wanted", "lacking", "running", "runs"),
    [
        ([3, 2, 1, -1], 5, 4, [], [0, 1, 2, 3]),  # the prompts have ended
        ([-1, -1, 0], 2, 1, [2], [0, 2]),
        ([2, 2, 2, -1], 4, 3, [0, 1], [0, 1, 2]),
        ([2, 2], 0, -3, [], [0]),  # something runs whatever the batch lacks
    ],
)
def test_what_runs_counts_and_something_runs(
    since: list[int], wanted: int, lacking: int, running: list[int], runs: list[int]
) -> None:
    """Groups by their place; the first ones are the oldest."""
    count = len(since)
    view = OpenGroups(
        tokens=np.zeros((count, 2), dtype=np.int64),
        finished=np.zeros((count, 2), dtype=np.bool_),
        sizes=np.full(count, 2, dtype=np.int64),
        ages=np.arange(count, 0, -1, dtype=np.int64),
        since_first_run=np.array(since, dtype=np.int64),
        running=np.isin(np.arange(count), running),
        wanted=wanted,
        lacking=lacking,
        log_lengths=LogLengths(),
    )
    assert TailBatching().members(view).tolist() == [2 * (place in runs) for place in range(count)]


# --- in the core ---------------------------------------------------------------------------------


config: Any = partial(
    SchedulerConfig,
    batch_groups=2,
    group_size=2,
    over_provision=1.5,
    refill="tail",
    max_staleness=RESTART,
)
"""Races of three groups of two for a batch of two."""


def prompt(group: GroupRecord | Group) -> int:
    """The number of the group's prompt."""
    return int(group.prompt.input_ids[0])


def prompts(driver: Driver) -> set[int]:
    """The prompts that run."""
    groups = driver.state.in_flight.groups
    return {prompt(groups[group_id]) for group_id in driver.group_ids()}


def race(driver: Driver, *, updates: bool = True) -> int:
    """Run one batch, in which the youngest group loses after 5 tokens; returns its prompt."""
    driver.request_batch()
    loser = max(driver.group_ids())
    loses = prompt(driver.state.in_flight.groups[loser])
    driver.progress_each(driver.attempts(loser), 5, first=1000)
    driver.finish_groups([group_id for group_id in driver.group_ids() if group_id != loser])
    driver.settle()
    if updates:
        driver.update()
    return loses


def test_the_losers_restart_at_the_update_and_share_a_batch() -> None:
    driver = Driver(config())
    losers = {race(driver), race(driver)}
    ledger = driver.state.in_flight.ledger
    assert ledger.rollouts == {Reason.BEGUN_AGAIN: 4}
    assert ledger.tokens == {Reason.BEGUN_AGAIN: 20}
    assert driver.state.in_flight.counters.tokens_discarded == 20
    given = driver.given
    driver.request_batch()
    assert driver.given == given, "a long batch needs no prompts"
    assert prompts(driver) == losers
    for send in driver.sends.values():
        group = driver.state.in_flight.groups[send.group_id]
        assert send.input_ids.tolist() == group.prompt.input_ids.tolist()
    driver.finish_groups(driver.group_ids(), 9)
    assert {prompt(group) for group in driver.batches[-1].groups} == losers
    for batch in driver.batches:
        assert all((r.versions == batch.version).all() for r in batch.rollouts)
        assert all(r.loss_mask.all() for r in batch.rollouts)
    assert not driver.state.in_flight.groups


def test_without_a_bound_the_losers_keep_their_tokens() -> None:
    driver = Driver(config(max_staleness=None))
    race(driver)
    race(driver)
    driver.request_batch()
    assert len(driver.sends) == 4
    for send in driver.sends.values():
        assert send.input_ids.tolist()[-5:] == list(range(1000, 1005))
    assert not driver.state.in_flight.ledger.total


@each_row("bound", [None, RESTART, Staleness(1)])
@each_row("ratio", [1.0, 1.25, 1.375, 2.5])
def test_every_prompt_is_delivered_after_a_bounded_number_of_batches(
    bound: Staleness | None, ratio: float
) -> None:
    """The last group of each race loses, and those of a long batch end in any order."""
    driver = Driver(config(batch_groups=8, over_provision=ratio, max_staleness=bound))
    first: dict[int, int] = {}
    took: dict[int, int] = {}
    longest = 2 if ratio == 1 else math.ceil(1 / (ratio - 1)) + 2
    for batch in range(16):
        driver.request_batch()
        for key in prompts(driver):
            first.setdefault(key, batch)
        while len(driver.batches) == batch:
            # The oldest prompts are the slowest ones: a prompt that lost once would always lose.
            groups = driver.state.in_flight.groups
            driver.finish_group(max(driver.group_ids(), key=lambda g: prompt(groups[g])))
        took |= {p: batch - first[p] for p in map(prompt, driver.batches[-1].groups)}
        driver.settle()
        driver.update()
    assert max(took.values()) <= longest
    late = [key for key, started in first.items() if key not in took and started < 16 - longest]
    assert not late


def restart(driver: Driver) -> None:
    batches = tuple(driver.state.delivery.unacknowledged)
    driver.feed(ev.BatchesAcknowledged(batches=batches))
    driver.save()
    driver.restart()


def test_a_restarted_group_names_the_group_it_replaces() -> None:
    driver = Driver(config(), store=MemoryStore())
    facts: list[GroupLaunched] = []
    launches = Launches()

    def hears(news: Sequence[Fact]) -> None:
        launches.on_facts(news, 0.0)
        facts.extend(fact for fact in news if isinstance(fact, GroupLaunched))

    driver.hears = hears
    race(driver)
    (again,) = (fact for fact in facts if fact.again is not None)
    assert again.again == max(fact.group_id for fact in facts[:-1])
    assert [group.launched for group in launches.by_group()] == [
        fact.group_id for fact in facts if fact.group_id < max(facts[2].group_id, 0)
    ], "the prompt is not counted twice"
    restart(driver)
    (restored,) = driver.state.in_flight.groups.values()
    assert (restored.group_id, restored.again) == (again.group_id, again.again)


def test_a_restart_within_a_race_keeps_the_same_groups() -> None:
    driver = Driver(config(), store=MemoryStore())
    loser = race(driver)
    driver.request_batch()
    racing = prompts(driver)
    restart(driver)
    driver.request_batch()
    driver.settle()
    assert prompts(driver) == racing
    assert loser not in racing


def test_the_end_of_the_prompts_brings_every_loser() -> None:
    driver = Driver(config(), supply=7)
    delivered: list[int] = []
    for _ in range(12):
        driver.request_batch()
        if driver.ended:
            break
        driver.finish_batch()
        delivered += [prompt(group) for group in driver.batches[-1].groups]
        driver.settle()
        driver.update()
    assert driver.ended
    assert len(delivered) == len(set(delivered)) == 7


def test_a_version_for_two_batches_throws_nothing_away_between_them() -> None:
    driver = Driver(config())
    loser = race(driver, updates=False)
    driver.request_batch()
    assert loser in {prompt(group) for group in driver.state.in_flight.groups.values()}
    assert not driver.state.in_flight.ledger.total


# --- settings ------------------------------------------------------------------------------------


def test_the_preset_is_on_policy_and_leaves_stragglers_alone() -> None:
    made = rollpacker(SchedulerConfig(batch_groups=64, straggler="abort"))
    assert made.policies.refill == TailBatching()
    assert (made.over_provision, made.max_staleness) == (1.25, RESTART)
    assert (made.batch_groups, made.straggler) == (64, "abort")


@each_row(
    ("changes", "message"),
    [
        ({"pace": "asynchronous"}, 'refill="tail" defers .* set pace="synchronous"'),
        ({"straggler": "run"}, 'refill="tail" defers .* straggler="retract" or "abort"'),
        ({"refill": "wave"}, "may restart forever; set refill="),
        ({"refill": "pool", "over_provision": 1.0}, "may restart forever"),
        ({"refill": LengthBuckets()}, "may restart forever"),
        (
            {"refill": "wave", "over_provision": "auto", "pace": "asynchronous"},
            "may restart forever",
        ),
        ({"max_staleness": Staleness(rule="restart")}, '"restart" without a bound'),
    ],
    ids=str,
)
def test_settings_that_contradict_it_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_groups_may_restart_if_every_batch_waits_for_its_own() -> None:
    config(refill="wave", over_provision=1.0)
    config(refill=LengthBuckets(), over_provision=1.0)
