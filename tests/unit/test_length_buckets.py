"""Tests length buckets: expected lengths of open groups, which groups run, which are deferred."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprilsched.config import Dispatch, SchedulerConfig, Staleness
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.lengths.log_lengths import LogLengths, rest_of_groups
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.length_buckets import LengthBuckets, window
from aprilsched.kernel.core.policies.refill import PoolView
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import GENERATING
from aprilsched.types import Prompt
from tests.support.driver import Driver, prompts, sampling
from tests.support.table import each_row

DIST = LogLengths(mean=6.5, deviation=0.9, shared=0.5, cap=6000.0)


def rest(
    tokens: list[list[int]], finished: list[list[bool]], distribution: LogLengths = DIST
) -> list[float]:
    return rest_of_groups(
        np.array(tokens, dtype=np.int64), np.array(finished, dtype=np.bool_), distribution
    ).tolist()


# --- what is expected ----------------------------------------------------------------------------


def test_long_siblings_make_a_group_longer_than_short_ones() -> None:
    """Finished or not; and not where siblings share nothing."""
    tokens = [[4000, 0, 0], [0, 0, 0], [60, 0, 0]]
    finished = [[True, False, False], [False] * 3, [True, False, False]]
    long, unknown, short = rest(tokens, finished)
    assert long > 1.2 * unknown
    assert unknown > 1.2 * short
    grown, unknown = rest([[3000, 0], [0, 0]], [[False] * 2, [False] * 2])
    assert grown > unknown
    long, _, short = rest(tokens, finished, replace(DIST, shared=1e-9))
    assert long == pytest.approx(short, rel=1e-3)


@each_row("siblings", [0, 2])
def test_beyond_the_middle_the_longer_it_has_been_the_longer_it_still_takes(siblings: int) -> None:
    """This holds for every distribution that has a tail, until the cap is near."""
    distribution = replace(DIST, cap=math.inf)
    middle = round(math.exp(distribution.mean))
    tokens = [[n] + [0] * siblings for n in range(middle, 10 * middle, middle // 8)]
    rests = rest(tokens, [[False] * (1 + siblings)] * len(tokens), distribution)
    assert rests == sorted(rests)
    assert rests[-1] > 1.5 * rests[0]


def test_a_place_without_a_length_is_not_evidence() -> None:
    """A group is smaller than the others, so it has no length at their last places."""
    padded, larger = rest(
        [[700, 0, 0, 0], [700, 0, 700, 700]], [[True, False, True, True], [True, False, True, True]]
    )
    (alone,) = rest([[700, 0]], [[True, False]])
    assert padded == pytest.approx(alone)
    assert padded != pytest.approx(larger)


@each_row("distribution", [DIST, LogLengths(), replace(DIST, deviation=0.05, shared=0.95)], ids=str)
@given(
    groups=st.lists(
        st.lists(st.tuples(st.integers(0, 6000), st.booleans()), min_size=4, max_size=4),
        min_size=1,
        max_size=6,
    )
)
def test_what_is_expected_is_finite_and_never_beyond_the_cap(
    distribution: LogLengths, groups: list[list[tuple[int, bool]]]
) -> None:
    tokens = [[n for n, _ in group] for group in groups]
    finished = [[done for _, done in group] for group in groups]
    for group, have, done in zip(
        rest(tokens, finished, distribution), tokens, finished, strict=True
    ):
        assert math.isfinite(group)
        left = [max(1.0, distribution.cap - n) for n, d in zip(have, done, strict=True) if not d]
        if left:
            assert 1.0 <= group <= max(left) + 1e-6
        else:
            assert group == 0.0


# --- which of them run ---------------------------------------------------------------------------


@given(
    groups=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=20),
    count=st.integers(-2, 20),
)
def test_no_other_neighbours_have_waited_longer(groups: list[tuple[int, int]], count: int) -> None:
    rests = np.array([r for r, _ in groups], dtype=np.float64)
    ages = np.array([a for _, a in groups], dtype=np.int64)
    chosen = window(rests, ages, count)
    count = max(0, min(count, len(groups)))
    assert len(set(chosen.tolist())) == count
    if not count:
        return
    order = np.argsort(rests, kind="stable")
    sums = [ages[order[i : i + count]].sum() for i in range(len(groups) - count + 1)]
    assert ages[chosen].sum() == max(sums)
    kept = rests[chosen]
    assert kept.tolist() == sorted(kept)
    between = [r for r in rests if kept[0] < r < kept[-1]]
    assert sorted(between) == [r for r in kept if kept[0] < r < kept[-1]], "no gap in the window"


@each_row(
    ("wave_due", "batch_open", "open_groups", "groups"),
    [
        (True, True, 0, 20),
        (True, True, 14, 6),
        (True, True, 25, 0),
        (False, True, 3, 0),
        (False, True, 0, 20),
        (False, False, 0, 0),
    ],
)
def test_the_store_is_filled_at_a_batchs_start_and_once_empty(
    wave_due: bool, batch_open: bool, open_groups: int, groups: int
) -> None:
    view = PoolView(
        batch_groups=8,
        group_size=2,
        target_groups=12,
        open_groups=open_groups,
        ready_groups=3,
        in_flight=2 * open_groups,
        wave_due=wave_due,
        batch_open=batch_open,
        asynchronous=False,
    )
    assert LengthBuckets(store=2.5).launches(view) == groups


# --- in the core ---------------------------------------------------------------------------------


config: Any = partial(
    SchedulerConfig,
    batch_groups=2,
    group_size=2,
    over_provision=1.5,
    refill=LengthBuckets(store=5.0),
    pace="synchronous",
    straggler="retract",
)
"""Length buckets that run three groups of two out of ten open ones; batches of two groups."""


def whole(driver: Driver) -> list[int]:
    """The groups that run with all their unfinished members, oldest first."""
    groups = driver.state.in_flight.groups
    return [g for g in driver.group_ids() if len(driver.attempts(g)) == groups[g].unfinished]


def fill(driver: Driver, count: int = 3) -> None:
    """Finish the first groups that run, until the batch is full and the engines stop."""
    batches = len(driver.batches)
    for group_id in whole(driver):
        if len(driver.batches) == batches:
            driver.finish_group(group_id, count)
    driver.settle()
    assert len(driver.batches) == batches + 1


@each_row(
    ("group_size", "probes", "sent"),
    [(2, 0, 6), (2, 1, 6 + 7), (2, 2, 6 + 7), (4, 2, 12 + 14), (4, 3, 12 + 14), (1, 1, 3)],
)
def test_as_many_members_are_probes_as_are_asked_for_but_at_most_half(
    group_size: int, probes: int, sent: int
) -> None:
    driver = Driver(config(group_size=group_size, refill=LengthBuckets(probes=probes)))
    driver.request_batch()
    assert len(driver.sends) == sent


@each_row("straggler", ["retract", "abort"])
def test_at_the_stop_everything_is_called_back_before_any_pause(straggler: str) -> None:
    driver = Driver(config(straggler=straggler))
    driver.request_batch()
    driver.finish_groups(whole(driver)[:2])
    assert len(driver.batches) == 1
    assert driver.aborts.keys() == driver.sends.keys()
    assert driver.sends
    while driver.aborts:
        assert not driver.controls, "no pause before they are back"
        driver.interrupt(next(iter(driver.aborts)))
    assert not driver.state.in_flight.queue
    sent = len(driver.sent)
    driver.update()
    assert len(driver.sent) == sent, "nothing is sent until the next batch"
    assert [refit.failed for refit in driver.updates] == [()]
    driver.request_batch()
    assert len(driver.sent) > sent


def test_recalled_requests_continue_with_their_tokens() -> None:
    driver = Driver(config(over_provision=4.0))
    driver.request_batch()
    ids = whole(driver)
    assert len(ids) == 8
    for group_id in ids[2:]:
        driver.progress_each(driver.attempts(group_id), 5, first=group_id)
    fill(driver)
    driver.update()
    driver.request_batch()
    assert set(ids[2:]) & set(whole(driver))
    for send in driver.sends.values():
        group = driver.state.in_flight.groups[send.group_id]
        expected = list(group.prompt.input_ids)
        if send.group_id in ids[2:]:
            expected += range(send.group_id, send.group_id + 5)
        assert send.input_ids.tolist() == expected


def test_a_probe_waits_until_its_group_is_chosen() -> None:
    driver = Driver(config())
    driver.request_batch()
    probed = {g for g in driver.group_ids() if len(driver.attempts(g)) == 1}
    for group_id in probed:
        driver.progress(driver.attempts(group_id)[0], 4)
    batches = 0
    while probed:
        fill(driver)
        driver.update()
        driver.request_batch()
        batches += 1
        running = probed & set(driver.group_ids())
        assert all(len(driver.attempts(group_id)) == 2 for group_id in running)
        probed -= running
        assert batches < 20


def test_probes_may_wait_for_the_tail_of_the_batch() -> None:
    driver = Driver(config(group_size=4, refill=LengthBuckets(probe_after=0.5)))
    driver.request_batch()
    running = whole(driver)
    assert len(running) == 3
    assert len(driver.sends) == 12
    driver.finish_each(driver.attempts()[:5])
    assert len(driver.sends) == 7, "fewer than half have ended"
    driver.finish(driver.attempts()[0])
    assert len(driver.sends) == 6 + 7
    driver.finish(driver.attempts()[0])
    assert len(driver.sends) == 5 + 7, "each group is probed once"
    fill(driver)
    driver.update()
    driver.request_batch()
    fresh = {g for g in driver.group_ids() if len(driver.attempts(g)) == 1}
    assert not fresh


ON_POLICY: dict[str, object] = {
    "over_provision": 1.0,
    "refill": LengthBuckets(store=3.0, oldest=2),
    "max_staleness": Staleness(0, rule="restart"),
}


def test_probes_that_are_thrown_away_are_remembered_by_the_key_of_their_prompt() -> None:
    driver = Driver(config(**ON_POLICY), keys=tuple(range(100)))
    driver.request_batch()
    probed = [g for g in driver.group_ids() if len(driver.attempts(g)) == 1]
    assert len(probed) == 4
    for group_id, tokens in zip(probed, (9, 800, 11, 700), strict=True):
        driver.progress(driver.attempts(group_id)[0], tokens)
    names = [driver.state.in_flight.groups[group_id].prompt.key for group_id in probed]
    fill(driver)
    assert len(driver.state.in_flight.ledger.entries) == 0
    driver.update()
    assert driver.state.in_flight.ledger.tokens == {Reason.BEGUN_AGAIN: 9 + 800 + 11 + 700}
    driver.request_batch()
    groups = driver.state.in_flight.groups
    pair = {groups[group_id].prompt.key for group_id in whole(driver)}
    assert pair in ({names[0], names[2]}, {names[1], names[3]})
    assert all(send.input_ids.tolist()[-1] == 7 for send in driver.sends.values())


def test_an_on_policy_batch_runs_only_the_groups_it_takes() -> None:
    """This holds for any number of overdue groups: groups beyond the batch would restart."""
    driver = Driver(config(**ON_POLICY))
    for _ in range(12):
        driver.request_batch()
        assert len(whole(driver)) == 2
        fill(driver)
        driver.update()
    dropped = [entry.tokens for entry in driver.state.in_flight.ledger.entries]
    assert not any(dropped)


@each_row(("oldest", "runs"), [(4, True), (5, False)])
def test_a_group_runs_once_its_first_token_reaches_the_age_limit(oldest: int, runs: bool) -> None:
    """The group is by far the longest, so no window has it as long as there are neighbours that
    waited longer."""
    driver = Driver(config(over_provision=1.0, refill=LengthBuckets(oldest=oldest)))
    driver.request_batch()
    longest = max(driver.group_ids())
    driver.progress(driver.attempts(longest)[0], 900)
    for _ in range(4):
        assert longest not in whole(driver)
        for group_id in whole(driver):
            short, long = driver.attempts(group_id)
            driver.finish(short, 2)
            driver.finish(long, 60)
        driver.settle()
        driver.update()
        driver.request_batch()
    assert len(driver.batches) == 4
    assert (longest in whole(driver)) is runs


def test_what_is_eligible_stays_eligible_when_its_engine_is_lost() -> None:
    driver = Driver(config())
    driver.request_batch()
    running = set(driver.group_ids())
    members = {(s.group_id, s.rollout_id) for s in driver.sends.values()}
    driver.feed(ev.EngineLost(engine="a", cause="burnt"))
    assert {send.engine for send in driver.sends.values()} == {"b"}
    assert set(driver.group_ids()) == running
    assert {(s.group_id, s.rollout_id) for s in driver.sends.values()} == members
    fill(driver)


def judge(driver: Driver, *, accepted: bool) -> None:
    for verdict in driver.verdicts:
        driver.feed(ev.Filtered(group_id=verdict.unit.unit_id, accepted=accepted))
    driver.verdicts.clear()
    driver.settle()


def test_a_rejected_bucket_is_followed_by_another_one_in_the_same_batch() -> None:
    driver = Driver(config(), accepts=True)
    driver.request_batch()
    opened = set(driver.state.in_flight.groups)
    driver.finish_each(driver.attempts())
    judge(driver, accepted=False)
    assert not driver.batches
    assert driver.sends
    assert set(driver.group_ids()) <= opened, "out of the store that is there"
    while not driver.batches:
        # One has run since before the verdicts, and the others follow it.
        driver.finish_groups(whole(driver))
        judge(driver, accepted=True)
    assert len(driver.batches) == 1


@each_row("store", [1.0, 5.0])
def test_a_store_that_is_rejected_to_its_last_group_is_filled_again(store: float) -> None:
    driver = Driver(config(refill=LengthBuckets(store=store), over_provision=1.0), accepts=True)
    driver.request_batch()
    first = set(driver.state.in_flight.groups)
    for _ in range(20):
        if first.isdisjoint(driver.state.in_flight.groups):
            break
        driver.finish_each(driver.attempts())
        judge(driver, accepted=False)
    assert driver.sends, "the trainer waits and nothing runs"
    driver.finish_each(driver.attempts())
    judge(driver, accepted=True)
    driver.finish_each(driver.attempts())
    judge(driver, accepted=True)
    assert len(driver.batches) == 1


def test_the_end_of_the_prompts_drains_the_store() -> None:
    driver = Driver(config(), supply=17)
    for _ in range(40):
        driver.request_batch()
        if driver.ended:
            break
        driver.finish_batch()
        driver.settle()
        driver.update()
    assert driver.ended
    counters = driver.state.in_flight.counters
    assert counters.launched == counters.delivered == 17 * 2
    assert not driver.state.in_flight.rollouts
    assert sum(len(delivered.groups) for delivered in driver.batches) == 17


def test_an_evaluation_runs_together_with_a_bucket_and_after_it() -> None:
    driver = Driver(config())
    driver.request_batch()
    driver.evaluate(3, start=900, group_size=2, evaluation_id=9)
    asked = {s.group_id for s in driver.sends.values()} - {
        group.group_id for group in driver.state.in_flight.training_groups()
    }
    assert len(asked) == 3
    driver.finish_groups([g for g in whole(driver) if g not in asked][:2])
    assert len(driver.batches) == 1
    back = {driver.sends[key].group_id for key in driver.aborts}
    assert back.isdisjoint(asked), "it is not called back"
    while driver.aborts:
        driver.interrupt(next(iter(driver.aborts)))
    assert set(driver.group_ids()) == asked
    assert not driver.controls
    driver.finish_each(driver.attempts())
    assert len(driver.evaluations[9].groups) == 3
    driver.settle()
    assert not driver.sends


def test_a_call_that_was_withdrawn_has_not_ended_its_bucket() -> None:
    driver = Driver(config(), takes=False)
    driver.request_batch()
    running = set(driver.sends)
    for _ in range(3):
        commands = driver.feed(ev.BatchWithdrawn())
        assert not [*commands, *driver.feed(ev.BatchRequested())]
    assert set(driver.sends) == running
    driver.feed(ev.BatchWithdrawn())
    driver.finish_groups(whole(driver))
    assert driver.state.delivery.offer is None, "no call waits for it"
    assert driver.aborts, "the bucket has ended"
    driver.settle()
    driver.feed(ev.BatchRequested())
    assert driver.state.delivery.offer is not None
    driver.take()
    driver.takes = True
    driver.request_batch()
    fill(driver)


def test_a_late_recall_gives_a_group_no_precedence() -> None:
    """The trainer takes two batches under one version, so it asks for the second one at once."""
    driver = Driver(config(batch_groups=2, group_size=4))
    driver.request_batch()
    driver.finish_groups(whole(driver)[:2])
    open_then = set(driver.sends)
    assert len(driver.aborts) == len(open_then) == 4 + 7
    driver.feed(ev.BatchRequested())
    driver.settle()
    assert not open_then & set(driver.sends)
    members = [len(driver.attempts(group_id)) for group_id in driver.group_ids()]
    assert sorted(members, reverse=True)[:4] in ([4, 4, 4, 1], [4, 4, 4]), "three groups run"
    fill(driver)


def test_what_ended_while_it_was_called_back_counts_for_the_next_bucket() -> None:
    driver = Driver(config())
    driver.request_batch()
    *first, last = whole(driver)
    driver.finish_groups(first)
    assert len(driver.batches) == 1
    driver.finish_group(last)
    driver.settle()
    assert [group.group_id for group in driver.state.in_flight.ready] == [last]
    driver.update()
    driver.request_batch()
    assert len(whole(driver)) == 2


def test_running_groups_continue_when_length_buckets_start() -> None:
    """Three groups stayed in the engines under waves, and five open groups should run."""
    settings = SchedulerConfig(batch_groups=2, group_size=2, over_provision="auto")
    driver = Driver(replace(settings, max_staleness=None))
    waves = Schedule(over_provision=2.5, refill=Wave())
    driver.feed(ev.Planned(schedule=waves))
    driver.request_batch()
    carried = driver.group_ids()[2:]
    fill(driver)
    assert driver.group_ids() == carried
    buckets = Schedule(over_provision=2.5, refill=LengthBuckets(store=5.0, probes=0))
    driver.feed(ev.Planned(schedule=buckets))
    driver.update()
    driver.request_batch()
    assert len(driver.state.in_flight.groups) == 10
    assert set(carried) < set(whole(driver))
    assert len(driver.group_ids()) == 5


def test_episodes_are_deferred_between_their_turns() -> None:
    driver = Driver(config(), episodes=True)
    driver.request_batch()
    assert len(driver.episodes_started) == 10 * 2
    for started in driver.episodes_started:
        driver.feed(
            ev.TurnRequested(rollout_id=started.rollout_id, input_ids=started.prompt.input_ids)
        )
    assert len(driver.sends) == 3 * 2 + 7
    waiting = [r for r in driver.state.in_flight.rollouts.values() if not r.eligible]
    assert all(rollout.state in GENERATING for rollout in waiting)


def test_a_group_longer_than_the_others_goes_last() -> None:
    """Every group is probed; the one whose probe was longest waits for the others."""
    own = (replace(sampling(10_000), ignore_eos=True),) * 2
    driver = Driver(config(over_provision=1.0), supply=0, auto_prompts=False)
    driver.feed(ev.BatchRequested())
    given = tuple(Prompt(input_ids=p.input_ids, sampling=own) for p in prompts(10))
    driver.feed(ev.PromptsArrived(prompts=given, last=True))
    driver.fetches.clear()
    first = whole(driver)
    ids = list(driver.state.in_flight.groups)
    lengths = {group_id: 40 * (1 + place) for place, group_id in enumerate(ids)}
    for group_id in ids:
        if group_id not in first:
            driver.finish(driver.attempts(group_id)[0], lengths[group_id])
    driver.finish_groups(first, 100)
    driver.settle()
    order: list[int] = []
    while len(driver.batches) < 5:
        driver.update()
        driver.request_batch()
        running = whole(driver)
        order += running
        for group_id in running:
            driver.finish_group(group_id, lengths[group_id])
        driver.settle()
    assert order == sorted(order, key=lengths.__getitem__)
    assert len(order) == 8


# --- refusals ------------------------------------------------------------------------------------


@each_row(
    ("changes", "message"),
    [
        ({"straggler": "in_place"}, 'set pace="synchronous" and straggler="retract" or "abort"'),
        ({"straggler": "run"}, 'set pace="synchronous" and straggler="retract" or "abort"'),
        ({"pace": "asynchronous"}, 'set pace="synchronous" and straggler="retract" or "abort"'),
        ({"refill": LengthBuckets(store=0.5)}, "refill.store is 0.5"),
        ({"refill": LengthBuckets(probes=-1)}, "refill.probes is -1"),
        ({"refill": LengthBuckets(oldest=0)}, "refill.oldest is 0"),
        (
            {"refill": LengthBuckets(probe_after=1.0)},
            "probe_after is 1.0; give a share",
        ),
    ],
    ids=str,
)
def test_settings_that_length_buckets_cannot_work_with_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_only_what_is_with_an_engine_is_called_back() -> None:
    driver = Driver(config(over_provision=5.0, dispatch=Dispatch(max_in_flight=4)))
    driver.request_batch()
    assert len(driver.sends) == 4
    commands = driver.feed(ev.SleepRequested(tags=("kv_cache",)))
    assert [type(command) for command in commands] == [do.Abort] * 4
    assert not driver.state.in_flight.queue
