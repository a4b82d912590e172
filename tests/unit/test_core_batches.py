"""Tests batches in the core: over-provisioning, refill, stop rules, surplus, end of prompts."""

from __future__ import annotations

import pytest

from aprilsched.config import Pool, Retries, Samples, SchedulerConfig, Staleness, Stop, Tokens
from aprilsched.kernel.core.messages import events as ev
from aprilsched.types import RefusedPrompt, Score
from tests.support.driver import Driver, prompts


def config(**changes: object) -> SchedulerConfig:
    values: dict[str, object] = {"batch_groups": 4, "group_size": 2, "over_provision": 2.0}
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def test_nothing_is_launched_before_a_batch_is_asked_for():
    driver = Driver(config())
    assert not driver.sends
    driver.request_batch()
    assert len(driver.sends) == 8 * 2


def test_asynchronous_pace_launches_at_once():
    assert len(Driver(config(pace="asynchronous")).sends) == 16


def test_a_batch_is_delivered_when_enough_groups_are_complete_and_groups_are_whole():
    driver = Driver(config())
    driver.request_batch()
    ids = driver.group_ids()
    for group_id in ids[:4]:
        assert not driver.batches
        driver.finish_group(group_id)
    (batch,) = driver.batches
    assert [group.group_id for group in batch.groups] == ids[:4]
    assert all(len(group.rollouts) == 2 for group in batch.groups)
    assert driver.state.in_flight.counters.delivered == 8


def test_the_second_wave_counts_the_carried_groups():
    driver = Driver(config())
    driver.request_batch()
    driver.finish_groups(driver.group_ids()[:4])
    driver.settle()
    driver.request_batch()
    # Four stragglers are carried, so a wave of eight starts four.
    assert driver.state.in_flight.counters.launched == (8 + 4) * 2


def test_surplus_groups_open_the_next_batch():
    driver = Driver(config(over_provision=1.5))
    driver.request_batch()
    ids = driver.group_ids()
    driver.finish_groups(ids[:3])
    for group_id in ids[3:5]:
        driver.finish(driver.attempts(group_id)[0])
    for group_id in (ids[3], ids[4]):
        if driver.attempts(group_id):
            driver.finish(driver.attempts(group_id)[0])
    assert [g.group_id for g in driver.batches[0].groups] == ids[:4]
    assert next(group.group_id for group in driver.state.in_flight.ready) == ids[4]
    driver.request_batch()
    driver.finish_groups([g for g in driver.group_ids() if g != ids[4]][:3])
    assert driver.batches[1].groups[0].group_id == ids[4]


def test_a_pool_is_refilled_by_whole_groups_together():
    driver = Driver(config(refill=Pool(together=2), over_provision=1.0))
    driver.request_batch()
    ids = driver.group_ids()
    assert driver.state.in_flight.counters.launched == 8
    driver.finish_group(ids[0])
    assert driver.state.in_flight.counters.launched == 8
    driver.finish_group(ids[1])
    assert driver.state.in_flight.counters.launched == 12


def test_a_rejected_group_is_replaced_without_a_full_wave():
    driver = Driver(config(over_provision=1.0), accepts=True)
    driver.request_batch()
    driver.finish_groups(driver.group_ids())
    for verdict in list(driver.verdicts)[:3]:
        driver.feed(ev.Filtered(group_id=verdict.group.group_id, accepted=True))
    driver.feed(ev.Filtered(group_id=driver.verdicts[3].group.group_id, accepted=False))
    driver.settle()
    assert not driver.batches
    assert len(driver.group_ids()) == 1
    assert driver.state.in_flight.ledger.rollouts == {"rejected": 2}
    driver.verdicts.clear()
    driver.finish_group(driver.group_ids()[0])
    driver.feed(ev.Filtered(group_id=driver.verdicts[0].group.group_id, accepted=True))
    assert len(driver.batches[0].groups) == 4


@pytest.mark.parametrize(("stop", "groups"), [(Samples(5), 3), (Tokens(11), 2)])
def test_stop_by_samples_and_by_tokens_delivers_whole_groups(stop: Stop, groups: int):
    driver = Driver(config(stop=stop))
    driver.request_batch()
    for group_id in driver.group_ids()[:groups]:
        assert not driver.batches
        driver.finish_group(group_id, count=3)
    assert len(driver.batches[0].groups) == groups


def test_stop_by_tokens_launches_more_when_everything_is_in_and_it_is_not_enough():
    driver = Driver(config(stop=Tokens(100), over_provision=1.0))
    driver.request_batch()
    driver.finish_groups(driver.group_ids(), count=1)
    assert driver.sends
    assert not driver.batches


@pytest.mark.parametrize(
    ("over_provision", "changes", "stops"),
    [
        (2.0, {}, False),
        (2.0, {"straggler": "in_place"}, False),
        (1.0, {"refill": Pool(together=1)}, True),
        (1.25, {"refill": "tail", "max_staleness": Staleness(0, rule="restart")}, True),
    ],
    ids=str,
)
def test_engines_continue_while_a_full_batch_awaits_rewards(
    over_provision: float, changes: dict[str, object], stops: bool
):
    """Engines continue only with requests beyond the batch, and only if their tokens are kept."""
    settings = config(over_provision=over_provision, **changes)
    driver = Driver(settings, reward_scope="rollout")
    driver.request_batch()
    ids = driver.group_ids()
    driver.finish_groups(ids[:4])
    assert not driver.batches
    assert bool(driver.controls or driver.aborts) == stops
    if not stops:
        driver.progress(driver.attempts(ids[4])[0], 3)
    for score in list(driver.scores):
        driver.feed(ev.Rewarded(rollout_id=score.rollout.rollout_id, score=Score(reward=1.0)))
    assert [r.reward for r in driver.batches[0].rollouts] == [1.0] * 8
    assert driver.controls or driver.aborts, "the offer stops them"


def test_a_pool_is_refilled_while_a_full_batch_waits_for_rewards_up_to_the_ready_batches():
    driver = Driver(config(refill=Pool(together=1), ready_batches=3), reward_scope="rollout")
    driver.request_batch()
    launched: list[int] = []
    for _ in range(30):
        if not driver.attempts():
            break
        driver.finish_group(driver.group_ids()[0])
        launched.append(driver.state.in_flight.counters.launched // 2)
    assert launched[:11] == [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    assert launched[11:] == [19] * 8, "three batches that wait for rewards, and a running pool"
    assert not driver.batches


def test_group_rewards():
    driver = Driver(config(), reward_scope="group")
    driver.request_batch()
    driver.finish_groups(driver.group_ids()[:4])
    for score in driver.group_scores:
        driver.feed(
            ev.GroupRewarded(
                group_id=score.group.group_id, scores=(Score(reward=0.25), Score(reward=0.75))
            )
        )
    assert [r.reward for r in driver.batches[0].groups[0].rollouts] == [0.25, 0.75]


def test_a_failed_reward_goes_to_the_ledger_with_its_cause():
    driver = Driver(config(over_provision=1.0), reward_scope="rollout")
    driver.request_batch()
    first = driver.group_ids()[0]
    driver.finish_group(first)
    driver.feed(ev.RewardFailed(group_id=first, cause="division by zero"))
    assert driver.state.in_flight.ledger.rollouts == {"reward_failed": 2}
    assert driver.state.in_flight.ledger.entries[0].cause == "division by zero"


def test_the_end_of_the_prompts_delivers_a_smaller_last_batch_and_then_ends():
    driver = Driver(config(), supply=5)
    driver.request_batch()
    driver.finish_groups(driver.group_ids()[:4])
    driver.request_batch()
    driver.finish_group(driver.group_ids()[0])
    assert [len(batch.groups) for batch in driver.batches] == [4, 1]
    driver.request_batch()
    assert driver.ended


def test_asynchronous_pace_holds_a_bounded_number_of_ready_batches():
    driver = Driver(config(pace="asynchronous", refill=Pool(together=1), ready_batches=2))
    for _ in range(100):
        if not driver.sends:
            break
        driver.finish(driver.attempts()[0])
    assert not driver.sends
    assert 8 <= len(driver.state.in_flight.ready) <= 8 + 8
    for _ in range(2):
        driver.feed(ev.BatchRequested())
    assert driver.sends


def test_an_evaluation_runs_to_its_end_and_is_neither_filtered_nor_carried():
    driver = Driver(config(), accepts=True)
    driver.evaluate(3, group_size=2, evaluation_id=9)
    assert len(driver.sends) == 6
    driver.feed(ev.UpdateRequested(version=1))
    assert not driver.controls, "an update waits for the evaluation"
    while driver.sends:
        driver.finish(driver.attempts()[0])
    assert len(driver.evaluations[9].groups) == 3
    driver.settle()
    assert driver.state.weights.versions.trainer == 1


@pytest.mark.parametrize("refill", ["wave", "pool", "buckets"])
@pytest.mark.parametrize("pace", ["synchronous", "asynchronous"])
def test_a_source_that_is_dry_for_now_does_not_stop_what_can_run(refill: str, pace: str):
    if (refill, pace) == ("buckets", "asynchronous"):
        pytest.skip("length buckets are synchronous")
    rule = Pool(together=2) if refill == "pool" else refill
    settings = config(batch_groups=4, over_provision=1.5, refill=rule, pace=pace)
    driver = Driver(settings, auto_prompts=False)
    if pace == "synchronous":
        driver.request_batch()
    else:
        driver.settle()
    (fetch,) = driver.fetches
    assert fetch.count >= 6
    assert not driver.sends, "a wave goes out together, if the source gives it together"
    driver.feed(ev.PromptsArrived(prompts=prompts(4), partial=True))
    assert len(driver.group_ids()) == 4
    assert driver.fetches == [fetch], "the rest of the answer follows"
    driver.feed(ev.PromptsArrived(prompts=prompts(1, start=4), partial=True))
    assert len(driver.group_ids()) == 5, "what comes later completes the wave"
    driver.feed(ev.PromptsArrived(prompts=prompts(fetch.count - 5, start=5)))
    # A pool is refilled by two groups together; length buckets take probes of the others, too.
    assert len(driver.group_ids()) >= (5 if refill == "pool" else 6)
    if pace == "asynchronous":
        driver.request_batch()
    driver.finish_groups(driver.group_ids()[:4])
    assert len(driver.batches[0].groups) == 4


def test_a_prompt_that_cannot_be_used_is_one_entry_and_is_replaced():
    driver = Driver(config(pace="synchronous", over_provision=1.0), auto_prompts=False)
    driver.request_batch()
    bad = RefusedPrompt(cause="it has no tokens")
    driver.feed(ev.PromptsArrived(prompts=(prompts(1)[0], bad)))
    assert len(driver.group_ids()) == 1
    assert [fetch.count for fetch in driver.fetches] == [4, 3]
    driver.feed(ev.PromptsArrived(prompts=prompts(3, start=2)))
    assert len(driver.group_ids()) == 4
    (entry,) = driver.state.in_flight.ledger.entries
    assert (entry.reason, entry.cause, entry.tokens) == ("bad_prompt", "it has no tokens", 0)
    assert driver.state.prompts.cursor == 5, "a resumed run passes over it"
    assert [refused.cause for refused in driver.refused] == ["it has no tokens"]


def test_a_source_of_bad_prompts_only_ends_the_run():
    driver = Driver(
        config(pace="synchronous", retries=Retries(failed_groups=3)), auto_prompts=False
    )
    driver.request_batch()
    bad = RefusedPrompt(cause="it has no tokens")
    driver.feed(ev.PromptsArrived(prompts=(bad,) * 8))
    (given_up,) = driver.given_up
    assert str(given_up.error).startswith(
        "3 groups in a row failed and none was accepted, the last because it has no tokens;"
    )
    assert driver.state.in_flight.ledger.total == 3
