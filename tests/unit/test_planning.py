"""Tests automatic scheduling: when a plan is requested, what it changes, and what is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from aprilsched.config import Dispatch, Samples, SchedulerConfig, Staleness, Tokens
from aprilsched.kernel.core.lengths.observed import GroupLengths, hashed_uniforms
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.length_buckets import LengthBuckets
from aprilsched.kernel.core.policies.objective import Objective
from aprilsched.kernel.core.policies.placement import Placement
from aprilsched.kernel.core.policies.pool import Pool
from aprilsched.kernel.core.policies.refill import Refill
from aprilsched.kernel.core.policies.schedule import Forecast, Pace, Schedule
from aprilsched.kernel.core.policies.tail_batching import TailBatching
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.kernel.core.state.caller_functions import CallerTimes
from aprilsched.kernel.values.capabilities import Reservation
from aprilsched.observe.figures.figures import steady_state
from aprilsched.observe.figures.summary import Summary
from aprilsched.planning import Planner
from aprilsched.planning.candidates import Space, candidates, in_words
from aprilsched.planning.draws import Times, drawn_again
from aprilsched.planning.halving import Halving, Tried, trials
from aprilsched.planning.planner import choose
from aprilsched.planning.presets import PRESETS
from aprilsched.planning.setting import Outcome, Setting
from aprilsched.planning.step_times.model import (
    H200_QWEN3_4B,
    H200_QWEN3_4B_LINEAR,
    StepTimeModel,
)
from aprilsched.planning.trial import Trial, try_out
from aprilsched.simulation import NEVER, Costs, Simulation
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.modelled_engine import ModelledEngine
from aprilsched.simulation.workload import LongTailWorkload
from aprilsched.types import Group, Prompt, Sample, Score
from tests.support.driver import Driver

at_length = partial(pytest.param, marks=pytest.mark.long)


def config(**changes: object) -> SchedulerConfig:
    """Automatic over-provisioning with KV that stays, so it starts with waves of 1.5 batches."""
    values: dict[str, object] = {
        "batch_groups": 2,
        "group_size": 2,
        "over_provision": "auto",
        "straggler": "in_place",
        "max_staleness": None,
    }
    return SchedulerConfig(**{**values, **changes})  # type: ignore[arg-type]


def schedule(ratio: float, refill: Refill | None = None) -> Schedule:
    return Schedule(over_provision=ratio, refill=refill or Wave())


# --- when ----------------------------------------------------------------------------------------


def batches(driver: Driver, count: int, *, tokens: int = 10) -> list[int]:
    """Run this number of batches with responses of equal length. Returns the batches after which a
    plan was asked for; no plan changes anything."""
    asked: list[int] = []
    for _ in range(count):
        before = len(driver.batches)
        driver.request_batch()
        while len(driver.batches) == before:
            driver.finish(driver.attempts()[0], tokens)
        driver.settle()
        driver.update()
        for _ in driver.plans:
            asked.append(len(driver.batches))
            driver.feed(ev.Planned(schedule=None))
        driver.plans.clear()
    return asked


def test_a_plan_is_asked_for_after_the_first_batch_and_then_three_times_as_late() -> None:
    assert batches(Driver(config()), 30) == [1, 3, 9, 27]


def test_nothing_is_planned_where_the_ratio_is_given() -> None:
    assert batches(Driver(config(over_provision=1.5)), 4) == []


def test_a_plan_is_asked_for_again_when_lengths_have_doubled() -> None:
    driver = Driver(config())
    assert batches(driver, 9, tokens=10) == [1, 3, 9]
    assert batches(driver, 16, tokens=20) == [17], "not sooner, and once"


def test_small_changes_of_the_lengths_are_not_drift() -> None:
    driver = Driver(config())
    batches(driver, 9, tokens=10)
    assert batches(driver, 16, tokens=12) == []


def test_a_plan_is_asked_for_again_when_rewards_take_longer() -> None:
    driver = Driver(config(), reward_scope="group")
    asked: list[int] = []
    for step in range(20):
        driver.request_batch()
        while len(driver.batches) == step:
            driver.finish(driver.attempts()[0], 10)
            driver.now += 1.0 if step < 9 else 60.0
            for score in driver.group_scores:
                scores = (Score(reward=1.0), Score(reward=0.0))
                driver.feed(ev.GroupRewarded(group_id=score.group.group_id, scores=scores))
            driver.group_scores.clear()
        driver.settle()
        driver.update()
        for _ in driver.plans:
            asked.append(len(driver.batches))
            driver.feed(ev.Planned(schedule=None))
        driver.plans.clear()
    assert asked == [1, 3, 9, 17]


def test_after_a_drift_only_recent_lengths_are_evidence() -> None:
    driver = Driver(config())
    batches(driver, 9, tokens=10)
    plans: list[do.Plan] = []
    while not plans and len(driver.batches) < 30:
        driver.request_batch()
        before = len(driver.batches)
        while len(driver.batches) == before:
            driver.finish(driver.attempts()[0], 20)
        driver.update()
        plans += driver.plans
    (plan,) = plans
    assert {n for group in plan.ended for n in group.tokens.tolist()} == {20}


def test_a_plan_has_all_that_is_known() -> None:
    driver = Driver(config(over_provision="auto"))
    driver.request_batch()
    first, second, open_group = driver.group_ids()
    driver.progress(driver.attempts(open_group)[0], 4)
    driver.progress(driver.attempts(open_group)[1], 6)
    for group_id, count in ((first, 7), (second, 9)):
        driver.finish_group(group_id, count)
    (plan,) = driver.plans
    assert sorted(group.tokens.tolist() for group in plan.ended) == [[7, 7], [9, 9]]
    assert [group.tokens.tolist() for group in plan.open] == [[4, 6]]
    assert (plan.engines, plan.kv_tokens, plan.prompt_tokens) == (2, None, 2.0)
    spare = driver.state.config.sampling.max_new_tokens - 8
    assert driver.state.expectations.spare_tokens == pytest.approx(spare)
    assert plan.spare_tokens == pytest.approx(spare)
    assert plan.reservation is None  # These engines keep no room.
    engines = driver.state.fleet.control.engines
    name = next(iter(engines))
    engines[name].able = replace(engines[name].able, reservation=Reservation(clip=7))
    assert driver.state.fleet.control.reservation == Reservation(clip=7)
    assert plan.current == driver.state.plan.schedule


def test_simulated_engines_are_tried_out_with_the_room_that_they_keep() -> None:
    """A simulation that did not say that they keep any was expected to be a seventh faster."""

    class Noted(Planner):
        def setting(self, *given: Any, **more: Any) -> Setting:
            tried_on.append(super().setting(*given, **more))
            return tried_on[-1]

    tried_on: list[Setting] = []
    settings = config(batch_groups=4, group_size=4, over_provision="auto")
    Simulation(settings, WORKLOAD, batches=3, engine=modelled(30_000),
               planner=Noted(inline=True)).run()  # fmt: skip
    assert tried_on
    assert all(each.spare_tokens > 100 for each in tried_on)
    assert {each.reservation for each in tried_on} == {Reservation(fixed_in_full=False)}
    tried_on.clear()
    fixed = replace(WORKLOAD, limits="exact")
    Simulation(settings, fixed, batches=3, engine=replace(modelled(30_000), reserve_clip=99),
               planner=Noted(inline=True)).run()  # fmt: skip
    assert {each.spare_tokens for each in tried_on} == {0.0}
    assert {each.reservation for each in tried_on} == {Reservation(clip=99)}


def test_a_trial_of_ranks_has_the_steps_of_one_and_the_room_of_all() -> None:
    ranked = Planner(H200_QWEN3_4B, max_running=64, dp_ranks=4)
    assert ranked.max_running == 256
    for batch, kv in ((1, 900), (40, 90_000), (300, 900_000)):
        whole = ranked.model.step_seconds(4 * batch, 4 * kv)
        assert whole == pytest.approx(H200_QWEN3_4B.step_seconds(batch, kv))


def test_trials_know_a_clip_that_servers_do_not_report() -> None:
    command = plan(schedule(1.0))
    assert command.reservation is not None
    own = Planner(reserve_clip=256).setting(command, rules()).reservation
    assert own == replace(command.reservation, clip=256)
    command = structs.replace(command, reservation=None)
    assert Planner(reserve_clip=256).setting(command, rules()).reservation is None


def test_a_plan_has_the_times_of_rewards_and_what_is_accepted() -> None:
    """A group's time runs from the end of its last response, with the verdict in it. A shorter
    group is accepted here, and a longer one refused."""
    driver = Driver(config(over_provision="auto"), reward_scope="group", accepts=True)
    driver.request_batch()
    while not driver.batches:
        group_id = driver.group_ids()[0]
        driver.finish_group(group_id, 3 if group_id % 2 else 9)
        driver.now += 5.0
        score = driver.group_scores.pop()
        scores = (Score(reward=1.0), Score(reward=0.0))
        driver.feed(ev.GroupRewarded(group_id=score.group.group_id, scores=scores))
        driver.now += 2.0
        filtered = driver.verdicts.pop().unit
        accepted = len(filtered.rollouts[0].token_ids) == 3
        driver.feed(ev.Filtered(group_id=filtered.group_id, accepted=accepted))
    (plan,) = driver.plans
    assert plan.reward_seconds == pytest.approx([7.0] * 3, abs=0.05)
    tokens, short, long = plan.accepted
    assert tokens == 6
    assert short > long > 0


@pytest.mark.parametrize("rewards", [0.0, 3.0])
def test_verdicts_are_shares_of_the_halves_that_begin_at_the_share_of_all(rewards: float) -> None:
    calls = CallerTimes()
    for tokens in range(100):
        calls.verdicts.append((tokens, tokens < 50 or tokens % 5 == 0))
        calls.rewards.add(rewards)
    tokens, short, long = calls.accepted
    assert tokens == 49.5
    assert short == pytest.approx((50 + 8 * 0.6) / 58)
    assert long == pytest.approx((10 + 8 * 0.6) / 58)
    assert calls.reward_seconds == (() if rewards == 0 else pytest.approx([rewards] * 32))


def test_times_are_kept_with_their_mean_and_their_tail() -> None:
    calls = CallerTimes()
    for n in range(1, 257):
        calls.gaps.add(500.0 if n % 64 == 0 else n / 100)
    parts = calls.gaps.parts
    assert len(parts) == 32
    assert np.mean(parts) == pytest.approx(np.mean(calls.gaps.last))
    assert parts[-1] > 250


def test_a_plan_has_the_gaps_between_the_turns_of_episodes() -> None:
    driver = Driver(config(over_provision="auto"), episodes=True)
    driver.request_batch()
    for turn in range(3):
        for started in driver.episodes_started:
            driver.feed(driver.dialogues.ask(started.rollout_id))
        for key in driver.attempts():
            driver.finish(key, 4)
        driver.now += 6.0 if turn < 2 else 1.5
    for started in driver.episodes_started:
        driver.feed(driver.dialogues.end(started.rollout_id))
    plan = driver.plans[0]
    assert plan.gaps == 2
    assert plan.gap_seconds == pytest.approx([6.0] * 12, abs=0.05)
    assert plan.end_seconds == pytest.approx([1.5] * 4, abs=0.05)


def test_a_deferred_group_is_evidence_by_its_probe() -> None:
    """Otherwise the groups that run whole are all that is known, and these are the short ones."""
    driver = Driver(config(straggler="retract"))
    driver.request_batch()
    for key in driver.attempts():
        driver.progress(key, 5)
    running = [g for g in driver.group_ids() if len(driver.attempts(g)) == 2]
    for group_id in running[:2]:
        driver.finish_group(group_id)
    (plan,) = driver.plans
    known = [group.tokens.tolist() for group in plan.open]
    assert known.count([5, 5]) == 1
    assert known.count([5, 0]) == len(known) - 1 > 0


def test_nothing_is_asked_for_while_a_plan_is_made() -> None:
    driver = Driver(config())
    for _ in range(5):
        before = len(driver.batches)
        driver.request_batch()
        while len(driver.batches) == before:
            driver.finish(driver.attempts()[0])
        driver.update()
    assert len(driver.plans) == 1


def test_a_plan_that_changes_nothing_keeps_the_schedule() -> None:
    driver = Driver(config())
    before = driver.state.plan.schedule
    batches(driver, 1)
    assert driver.state.plan.schedule is before


def test_a_new_schedule_is_in_force_from_the_next_batch_on() -> None:
    driver = Driver(config())
    batches(driver, 2)
    driver.feed(ev.Planned(schedule=schedule(3.0)))
    driver.request_batch()
    assert driver.state.in_flight.training == 6
    driver.settle()
    batches_before = len(driver.batches)
    while len(driver.batches) == batches_before:
        driver.finish(driver.attempts()[0])
    driver.update()
    driver.feed(ev.Planned(schedule=schedule(1.0, Pool(together=1))))
    driver.request_batch()
    while driver.sends:
        assert driver.state.in_flight.generating <= 2 * 2 + 4 * 2
        driver.finish(driver.attempts()[0])


@pytest.mark.parametrize("straggler", ["retract", "abort"])
@pytest.mark.parametrize("refill", [Wave(), Pool(together=1)], ids=["wave", "pool"])
def test_from_length_buckets_to_anything_else_everything_deferred_is_sent(
    straggler: str, refill: Refill
) -> None:
    driver = Driver(config(straggler=straggler))
    driver.request_batch()
    assert isinstance(driver.state.plan.schedule.refill, LengthBuckets)
    running = [g for g in driver.group_ids() if len(driver.attempts(g)) == 2]
    for group_id in running[:2]:
        driver.finish_group(group_id)
    driver.settle()
    driver.update()
    assert not driver.sends
    driver.feed(ev.Planned(schedule=schedule(2.0, refill)))
    assert not driver.sends, "no batch is asked for"
    driver.request_batch()
    assert len(driver.sends) == 8 * 2
    assert all(rollout.eligible for rollout in driver.state.in_flight.rollouts.values())


def test_from_length_buckets_to_waves_within_a_batch_and_within_the_calling_back() -> None:
    driver = Driver(config(straggler="retract"))
    driver.request_batch()
    driver.feed(ev.Planned(schedule=schedule(2.0)))
    assert len(driver.sends) == 10 * 2, "the deferred ones are sent at once"
    driver = Driver(config(straggler="retract"))
    driver.request_batch()
    driver.feed(ev.SleepRequested(tags=("kv_cache",)))
    assert driver.aborts
    driver.feed(ev.Planned(schedule=schedule(2.0)))
    driver.settle()
    assert not driver.sends
    driver.feed(ev.WakeRequested())
    driver.settle()
    assert len(driver.sends) == 10 * 2


@pytest.mark.parametrize("straggler", ["retract", "abort"])
def test_running_groups_continue_from_waves_to_length_buckets(straggler: str) -> None:
    driver = Driver(config(straggler=straggler))
    driver.feed(ev.Planned(schedule=schedule(3.0)))
    batches(driver, 1)
    carried = {group.group_id for group in driver.state.in_flight.training_groups()}
    driver.feed(ev.Planned(schedule=schedule(1.5, LengthBuckets(store=5.0))))
    driver.request_batch()
    assert driver.state.in_flight.training == 10
    assert carried <= set(driver.group_ids())
    assert batches(driver, 0) == []
    while len(driver.batches) < 6:
        before = len(driver.batches)
        while len(driver.batches) == before:
            driver.finish(driver.attempts()[0])
        driver.settle()
        driver.update()
        driver.request_batch()


# --- trials against the simulation ---------------------------------------------------------------

WORKLOAD = LongTailWorkload()


@cache
def drawn(groups: int) -> NDArray[np.int64]:
    return np.stack([WORKLOAD.lengths(index) for index in range(groups)])


@dataclass
class Steps:
    """The time and the work of the engines at each request for a batch, and staleness."""

    engines: Sequence[ModelledEngine] = ()
    now: list[float] = field(default_factory=list[float])
    work: list[float] = field(default_factory=list[float])
    ages: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])

    def on_event(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.BatchRequested):
            counters = [engine.batcher.counters for engine in self.engines]
            thin = sum(c.generated for c in counters) / 512 - sum(c.steps for c in counters)
            self.now.append(now)
            work = sum(c.decode_seconds for c in counters) + H200_QWEN3_4B_LINEAR.t0 * thin
            self.work.append(work)

    def on_command(self, command: do.Command, now: float) -> None:
        if isinstance(command, do.Deliver):
            batch = command.batch
            ages = [batch.version - r.versions.astype(np.int64) for r in batch.rollouts]
            self.ages.append(np.concatenate(ages))


@dataclass
class Measured:
    """Figures of whole steps, the trainer's time included."""

    step_seconds: float
    efficiency: float
    off_policy_share: float
    mean_staleness: float


def simulated_and_tried(
    settings: SchedulerConfig,
    counted: int,
    burn_in: int,
    *,
    kv: int | None = None,
    engines: int = 1,
    train_seconds: float = 0.0,
    refit_seconds: float = 0.0,
    reward_seconds: float = 0.0,
    accepted: tuple[float, float, float] = (0.0, 1.0, 1.0),
    pauses: tuple[float, ...] = (),
    timing: StepTimeModel = H200_QWEN3_4B_LINEAR,
) -> tuple[Measured, Outcome]:
    """Return what the simulation and a trial measure for batches `burn_in` to `counted`.

    Both use the same lengths, so their results differ without noise. With length buckets they
    diverge at some point.
    """
    steps = Steps()
    drawn_groups = settings.batch_groups * (counted + 8) * (1 if accepted[1] == 1.0 else 3)
    simulation = Simulation(
        settings,
        WORKLOAD,
        engines=engines,
        batches=counted + 1,
        engine=replace(modelled(kv or 1_000_000), timing=timing),
        costs=Costs(
            train_seconds=train_seconds,
            refit_seconds=refit_seconds,
            reward_seconds=reward_seconds,
            pause_seconds=0.0,
        ),
        accept=None
        if accepted[1:] == (1.0, 1.0)
        else accepting(accepted, drawn_groups, settings.delivery),
        pauses=pausing(pauses) if pauses else None,
        listeners=[steps],
    )
    steps.engines = list(simulation.engines.values())
    simulation.run()
    policies, groups = settings.policies, settings.batch_groups
    assert policies.over_provision is not None
    tried_on = setting(
        lengths=drawn(drawn_groups),
        batch_groups=groups,
        engines=engines,
        pace=settings.pace,
        keeps_kv=settings.straggler == "in_place",
        runs_out=settings.straggler == "run",
        max_staleness=policies.staleness.bound,
        stop=policies.stop,
        siblings=policies.siblings,
        model=timing,
        kv_tokens=kv,
        train_seconds=train_seconds,
        refit_seconds=refit_seconds,
        reward_times=(reward_seconds,) if reward_seconds else (),
        accepted=accepted,
        gaps=len(pauses),
        gap_times=pauses,
        batches=counted - burn_in,
        burn_in=burn_in // 3 if policies.refill.defers else burn_in,
    )
    tried = Schedule(over_provision=policies.over_provision, refill=policies.refill)
    seconds = steps.now[counted] - steps.now[burn_in]
    ages = np.concatenate(steps.ages[burn_in:counted])
    measured = Measured(
        step_seconds=seconds / (counted - burn_in),
        efficiency=(steps.work[counted] - steps.work[burn_in]) / seconds / engines,
        off_policy_share=float((ages > 0).mean()),
        mean_staleness=float(ages.mean()),
    )
    return measured, Trial(tried, tried_on).outcome(counted - burn_in)


def accepting(
    shares: tuple[float, float, float], groups: int, delivery: str
) -> Callable[[Group | Sample], bool]:
    """Accepts the same groups or samples as a trial with these shares."""
    tokens, short, long = shares
    lengths = drawn(groups) if delivery == "samples" else drawn(groups).sum(axis=1)[:, None]
    verdicts = hashed_uniforms(lengths.shape, seed=6) < np.where(lengths <= tokens, short, long)

    def accept(unit: Group | Sample) -> bool:
        place = unit.rollout.index if isinstance(unit, Sample) else 0
        return bool(verdicts[int(unit.prompt.key or 0), place])

    return accept


def pausing(times: tuple[float, ...]) -> Callable[[Prompt, int], list[float]]:
    """Return a function that makes one gap per time, with the values that a trial draws."""
    drawn_times, turns = Times(times, seed=8), len(times) + 1

    def pauses(prompt: Prompt, index: int) -> list[float]:
        row, length = int(prompt.key or 0), WORKLOAD.lengths(int(prompt.key or 0))[index]
        return [drawn_times.of(row, index, length * n // turns) for n in range(1, turns)]

    return pauses


def modelled(kv_tokens: int) -> SimConfig:
    """An engine that makes no tokens."""
    return SimConfig(
        timing=H200_QWEN3_4B_LINEAR,
        make_tokens=False,
        stream_interval=NEVER,
        kv_tokens=kv_tokens,
    )


@pytest.mark.parametrize(
    ("straggler", "changes"),
    [
        at_length("retract", {"over_provision": 1.25}),
        at_length("retract", {"over_provision": 2.0}),
        ("retract", {"over_provision": 1.25, "refill": "pool"}),
        ("retract", {"over_provision": 1.625, "refill": "buckets"}),
        at_length("in_place", {"over_provision": 1.25}),
        at_length("in_place", {"over_provision": 2.0}),
        at_length("in_place", {"over_provision": 1.25, "refill": "pool"}),
        at_length("run", {"over_provision": 1.25}),
        at_length("retract", {"over_provision": 1.5, "kv": 100_000}),
        at_length("in_place", {"over_provision": 1.25, "kv": 100_000}),
        at_length("retract", {"over_provision": 1.5, "stop": Tokens(250_000)}),
        at_length("retract", {"over_provision": 1.5, "stop": Samples(100)}),
        ("in_place", {"over_provision": 1.5, "delivery": "samples"}),
        at_length("in_place", {"over_provision": 2.0, "delivery": "samples", "siblings": 6}),
        at_length("retract", {"over_provision": 1.25, "delivery": "samples", "refill": "pool"}),
        at_length("in_place", {"over_provision": 1.5, "delivery": "samples", "max_staleness": 1}),
        at_length("run", {"over_provision": 1.25, "delivery": "samples", "siblings": 1}),
    ],
    ids=str,
)
def test_a_trial_does_what_the_simulation_does(straggler: str, changes: dict[str, Any]) -> None:
    changes = dict(changes)
    kv = changes.pop("kv", None)
    settings = SchedulerConfig(straggler=straggler, **changes)  # type: ignore[arg-type]
    measured, outcome = simulated_and_tried(settings, 30, 9, kv=kv)
    # A trial only approximates the order in which a full pool lets requests continue, and from the
    # first batch the number of groups that a token count takes.
    policies = settings.policies
    rough = policies.refill.defers or kv is not None or isinstance(policies.stop, Tokens)
    near = 0.03 if rough else 0.005
    assert outcome.efficiency == pytest.approx(measured.efficiency, rel=near)
    assert outcome.off_policy_share == pytest.approx(measured.off_policy_share, abs=near)
    assert outcome.step_seconds == pytest.approx(measured.step_seconds, rel=0.03)


def test_a_trial_knows_that_speculation_speeds_up_the_tail() -> None:
    """A batch of 256 responses gets one token per step, and a response that is alone gets four."""
    drafting = replace(H200_QWEN3_4B_LINEAR, tokens_per_step=((1, 4.0), (32, 2.0), (256, 1.0)))
    seconds: dict[StepTimeModel, list[float]] = {H200_QWEN3_4B_LINEAR: [], drafting: []}
    for timing, of in seconds.items():
        for ratio in (1.0, 2.0):
            settings = SchedulerConfig(straggler="in_place", over_provision=ratio)
            measured, outcome = simulated_and_tried(settings, 24, 9, timing=timing)
            assert outcome.step_seconds == pytest.approx(measured.step_seconds, rel=0.03)
            assert outcome.off_policy_share == pytest.approx(measured.off_policy_share, abs=0.01)
            assert outcome.efficiency <= 1
            of.append(outcome.step_seconds)
    (plain_wait, plain), (wait, early) = seconds.values()
    assert wait < 0.75 * plain_wait
    assert plain > early > 0.75 * plain, "wide batches gain little"
    assert wait / early < 0.85 * plain_wait / plain


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({"over_provision": 1.0}, 0.02),
        at_length({"over_provision": 1.5, "straggler": "in_place"}, 0.02),
        at_length({"over_provision": 1.25, "straggler": "run"}, 0.03),
    ],
    ids=str,
)
def test_a_trial_of_several_engines_divides_groups(changes: dict[str, Any], near: float) -> None:
    settings = SchedulerConfig(batch_groups=8, dispatch=Dispatch(placement="spread"), **changes)
    measured, outcome = simulated_and_tried(settings, 16, 5, engines=4, refit_seconds=1.0)
    assert outcome.step_seconds == pytest.approx(measured.step_seconds, rel=near)
    assert outcome.efficiency == pytest.approx(measured.efficiency, rel=near)
    assert outcome.mean_staleness == pytest.approx(measured.mean_staleness, abs=5 * near)


@pytest.mark.parametrize(
    ("train_seconds", "changes"),
    [
        (20.0, {"over_provision": 1.25}),
        at_length(20.0, {"over_provision": 1.0, "pace": "asynchronous"}),
        (20.0, {"refill": Pool(together=1), "max_staleness": 4, "pace": "asynchronous"}),
        (5.0, {"over_provision": 2.0, "refill": "pool", "pace": "asynchronous"}),
        at_length(60.0, {"refill": "pool", "pace": "asynchronous", "straggler": "in_place"}),
        at_length(5.0, {"over_provision": 1.5, "straggler": "run"}),
        at_length(5.0, {"over_provision": 1.5, "pace": "asynchronous", "straggler": "run"}),
    ],
    ids=str,
)
def test_a_trial_takes_the_time_of_whole_steps(
    train_seconds: float, changes: dict[str, Any]
) -> None:
    """The refit takes 2 s, so every part of a step is there."""
    settings = SchedulerConfig(batch_groups=16, **changes)
    measured, outcome = simulated_and_tried(
        settings, 18, 7, train_seconds=train_seconds, refit_seconds=2.0
    )
    step_seconds = outcome.step_seconds + outcome.trainer_seconds
    assert step_seconds == pytest.approx(measured.step_seconds, rel=0.01)
    efficiency = outcome.efficiency * outcome.step_seconds / step_seconds
    assert efficiency == pytest.approx(measured.efficiency, rel=0.01)
    assert outcome.off_policy_share == pytest.approx(measured.off_policy_share, abs=0.01)
    assert outcome.mean_staleness == pytest.approx(measured.mean_staleness, abs=0.03)


REWARDS = {"reward_seconds": 20.0}
SLOW_REWARDS = {"reward_seconds": 60.0}
HALF = {"accepted": (0.0, 0.5, 0.5)}
SHORT = {"accepted": (8000.0, 0.9, 0.3)}
SHORT_SAMPLES = {"accepted": (800.0, 0.9, 0.3)}
TOOLS = {"pauses": (2.0, 15.0, 4.0)}
AHEAD = {"pace": "asynchronous", "over_provision": 1.5}
SAMPLES = {"delivery": "samples", "straggler": "in_place"}


@pytest.mark.parametrize(
    ("caller", "changes", "near"),
    [
        (REWARDS, {"over_provision": 1.0}, 0.01),
        at_length(SLOW_REWARDS, {"over_provision": 2.0, "refill": Pool(together=4)}, 0.01),
        at_length(REWARDS, {"over_provision": 2.0, "straggler": "in_place"}, 0.01),
        (REWARDS, {**AHEAD, "refill": "pool"}, 0.01),
        at_length(HALF, {"over_provision": 1.5, "refill": "buckets"}, 0.04),
        (SHORT, {**AHEAD, "refill": "pool"}, 0.01),
        at_length(SHORT | REWARDS, {"over_provision": 2.0}, 0.01),
        at_length(TOOLS, {"over_provision": 1.0}, 0.01),
        at_length(TOOLS, {"over_provision": 1.5, "refill": "buckets"}, 0.04),
        at_length(TOOLS, {**AHEAD, "refill": "pool"}, 0.01),
        at_length(TOOLS, {"over_provision": 1.5, "straggler": "run"}, 0.01),
        (SHORT_SAMPLES | REWARDS, {**SAMPLES, "over_provision": 1.5}, 0.01),
        at_length(REWARDS, {**SAMPLES, **AHEAD, "refill": "pool"}, 0.01),
        at_length(TOOLS, {**SAMPLES, **AHEAD}, 0.01),
    ],
    ids=str,
)
def test_a_trial_knows_rewards_filters_and_tools(
    caller: dict[str, Any], changes: dict[str, Any], near: float
) -> None:
    """Both have the same verdicts and the same gaps."""
    settings = SchedulerConfig(batch_groups=16, **changes)
    measured, outcome = simulated_and_tried(
        settings, 20, 7, train_seconds=3.0, refit_seconds=1.0, **caller
    )
    step_seconds = outcome.step_seconds + outcome.trainer_seconds
    assert step_seconds == pytest.approx(measured.step_seconds, rel=near)
    assert outcome.mean_staleness == pytest.approx(measured.mean_staleness, abs=0.02 + 4 * near)


def test_the_trainers_times_scatter_around_their_mean_in_a_trial() -> None:
    """A trainer whose time varies overlaps less with generation."""
    slow = setting(train_seconds=15.0, pace="asynchronous")
    scattered = replace(slow, train_spread=10.0)
    even, uneven = try_out(schedule(1.0), slow), try_out(schedule(1.0), scattered)
    assert uneven.step_seconds > 1.02 * even.step_seconds
    alone = [try_out(schedule(1.0), replace(s, pace="synchronous")) for s in (slow, scattered)]
    assert alone[1].trainer_seconds == pytest.approx(alone[0].trainer_seconds, rel=0.01)


def test_refits_interrupt_a_pool_that_takes_over() -> None:
    """Equal responses that start together also end together, which leaves nothing to recompute."""
    equal = setting(lengths=np.full((400, 8), 1000), pace="asynchronous")
    pool = schedule(4.0, Pool(together=4))
    together, scattered = (
        try_out(pool, replace(equal, takes_over=takes_over)) for takes_over in (False, True)
    )
    assert scattered.efficiency < 0.9 * together.efficiency
    assert scattered.off_policy_share > together.off_policy_share


def test_a_continued_trial_equals_a_longer_one() -> None:
    trial = Trial(schedule(1.5), setting())
    assert trial.outcome(6) == try_out(schedule(1.5), setting(batches=6))
    assert trial.outcome(24) == try_out(schedule(1.5), setting(batches=24))


# --- the objective -------------------------------------------------------------------------------


def test_a_token_is_worth_less_with_its_age_and_nothing_beyond_the_bound() -> None:
    objective = Objective(staleness_scale=2.0)
    ages = {0: 5.0, 2: 3.0, 4: 2.0}
    assert objective.usefulness(ages, bound=None) == pytest.approx(
        0.5 + 0.3 * np.exp(-1) + 0.2 * np.exp(-2)
    )
    assert objective.usefulness(ages, bound=2) == pytest.approx(0.5 + 0.3 * np.exp(-1))
    assert Objective(staleness_scale=math.inf).usefulness(ages, bound=2) == pytest.approx(0.8)
    assert objective.usefulness({}, bound=2) == 1


def test_a_batch_is_worth_less_only_beyond_the_distance_of_a_random_one() -> None:
    objective = Objective(distance_price=0.5)
    assert objective.share_left(0.3, 0.1) == pytest.approx(0.9)
    assert objective.share_left(0.05, 0.1) == 1


def test_the_value_of_a_trial_is_useful_work_for_the_time_of_whole_steps() -> None:
    free = Objective(staleness_scale=math.inf, distance_price=0.0)
    plain = try_out(schedule(2.0), setting(objective=free))
    assert plain.value == pytest.approx(plain.efficiency)
    waits = try_out(schedule(2.0), setting(objective=free, train_seconds=plain.step_seconds))
    assert waits.value == pytest.approx(plain.value / 2, rel=0.06)
    assert waits.efficiency == pytest.approx(plain.efficiency)
    priced = Objective(staleness_scale=17.0, distance_price=0.0)
    aged = try_out(schedule(2.0), setting(objective=priced))
    assert aged.value == pytest.approx(plain.value * np.exp(-plain.mean_staleness / 17), rel=0.01)
    priced = replace(free, distance_price=0.5)
    far = try_out(schedule(1.5, LengthBuckets()), setting(objective=priced, iid_distance=0.1))
    assert far.distance > 0.12
    assert far.value == pytest.approx(far.efficiency * (1 - 0.5 * (far.distance - 0.1)))


@pytest.mark.parametrize(("staleness_scale", "fresh"), [(2.0, True), (math.inf, False)])
def test_who_pays_for_age_gets_younger_tokens(staleness_scale: float, fresh: bool) -> None:
    tried_on = setting(objective=Objective(staleness_scale=staleness_scale), batches=8)
    best = choose(trials(tried_on, candidates(tried_on, Space(may_defer=False))), TOLERANCE)
    assert (best.outcome.mean_staleness < 0.7) is fresh


def test_a_response_that_is_alone_takes_as_long_on_one_of_many_engines() -> None:
    """Its context is read by one engine, whatever the others do."""
    alone = setting(lengths=np.full((100, 1), 1000), batch_groups=1, prompt_tokens=8000.0)
    alone = replace(alone, model=H200_QWEN3_4B)
    one, many = try_out(schedule(1.0), alone), try_out(schedule(1.0), replace(alone, engines=8))
    assert many.step_seconds == pytest.approx(one.step_seconds, rel=0.03)


def test_lengths_that_are_drawn_again_have_the_same_law() -> None:
    lengths = np.maximum(1, (300 / drawn(200) * 1000).astype(np.int64))
    lengths[::2, 4:] = 0
    again = drawn_again(setting(lengths=lengths))
    assert np.array_equal(np.sort(again[again > 0]), np.sort(lengths[lengths > 0]))
    assert np.array_equal(again > 0, lengths > 0)
    assert not np.array_equal(again, lengths)


def test_what_is_drawn_again_tells_of_a_group_what_any_response_does() -> None:
    logs = np.log(drawn(2000)[:, :2])
    again = np.log(drawn_again(setting(lengths=drawn(2000)[:, :2])))
    between = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
    assert np.corrcoef(again[:, 0], logs[:, 1])[0, 1] == pytest.approx(between, abs=0.05)
    assert np.corrcoef(again[:, 0], again[:, 1])[0, 1] == pytest.approx(between, abs=0.05)


def test_an_engine_that_is_full_lets_the_rest_wait() -> None:
    free, narrow = try_out(schedule(2.0), setting()), try_out(schedule(2.0), setting(max_running=8))
    assert narrow.peak_kv < free.peak_kv / 3


def test_kept_kv_saves_prefill_and_nothing_else() -> None:
    again, kept = try_out(schedule(2.0), setting()), try_out(schedule(2.0), setting(keeps_kv=True))
    assert kept.efficiency > 1.05 * again.efficiency
    assert kept.off_policy_share == again.off_policy_share


# --- the choice ----------------------------------------------------------------------------------


def setting(**changes: Any) -> Setting:
    """Batches of 16 groups of 8 on one engine."""
    values: dict[str, Any] = {
        "lengths": drawn(32 * 24),
        "batch_groups": 16,
        "model": H200_QWEN3_4B_LINEAR,
        "prompt_tokens": 8.0,
    }
    return Setting(**{**values, **changes})


def outcome(efficiency: float, stale: float, *, late: float = 0.0) -> Outcome:
    return Outcome(
        value=efficiency,
        step_seconds=1.0,
        trainer_seconds=0.0,
        efficiency=efficiency,
        off_policy_share=1.0,
        mean_staleness=stale,
        distance=0.0,
        too_stale_share=late,
        peak_kv=0.0,
    )


@pytest.mark.parametrize(
    ("outcomes", "place"),
    [
        ([outcome(0.80, 0.7), outcome(0.795, 0.5), outcome(0.78, 0.1)], 1),
        ([outcome(0.80, 0.7), outcome(0.7919, 0.5)], 0),
        ([outcome(0.80, 0.7), outcome(0.7921, 0.5)], 1),
        ([outcome(0.79, 0.0), outcome(0.80, 0.0), outcome(0.795, 0.0)], 1),
        ([outcome(0.793, 0.0), outcome(0.80, 0.0)], 0),
        ([outcome(0.90, 0.1, late=0.006), outcome(0.5, 0.6, late=0.004)], 1),
        ([outcome(0.90, 0.1, late=0.2), outcome(0.5, 0.6, late=0.1)], 1),
    ],
    ids=["within", "below", "just above", "equally stale", "waits", "too stale", "nothing fresh"],
)
def test_the_least_stale_within_the_tolerance_of_the_fastest_allowed(
    outcomes: list[Outcome], place: int
) -> None:
    tried = [Tried(schedule=schedule(1.0 + i), outcome=o) for i, o in enumerate(outcomes)]
    chosen = choose(tried, TOLERANCE)
    assert chosen is tried[place]


@pytest.mark.parametrize(
    ("value", "stale", "stays"),
    [(0.80, 1.14, True), (0.80, 1.15, False), (0.789, 1.0, True), (0.787, 0.9, False)],
)
def test_the_schedule_in_force_may_be_a_little_worse_or_staler(
    value: float, stale: float, stays: bool
) -> None:
    now = Tried(schedule=schedule(2.0), outcome=outcome(value, stale))
    other = Tried(schedule=schedule(1.5), outcome=outcome(0.80, 1.0))
    assert (choose([now, other], TOLERANCE, now.schedule) is now) is stays
    zero = [replace(each, outcome=outcome(0.80, 0.0)) for each in (other, now)]
    assert choose(zero, TOLERANCE, now.schedule) is zero[1]


@pytest.mark.parametrize("delivery", ["groups", "samples"])
def test_a_slow_trainer_gets_the_freshest_schedule_that_keeps_it_busy(delivery: str) -> None:
    """All tokens are off-policy then, so their share would not decide."""
    settings = rules(delivery=delivery, pace="auto", straggler="in_place")
    stale = replace(schedule(2.5), pace="asynchronous")
    command = structs.replace(plan(stale), paces=BOTH, train_seconds=60.0)
    tried_on = Planner().setting(command, settings)
    best = try_out(Planner().plan(command, settings), tried_on)
    before = try_out(stale, tried_on)
    assert best.off_policy_share > 0.99
    assert best.step_seconds == pytest.approx(before.step_seconds, rel=TOLERANCE)
    assert best.mean_staleness < before.mean_staleness - 0.5


def rules(**changes: object) -> SchedulerConfig:
    """Rules for batches of 16 groups of 4."""
    values: dict[str, object] = {"batch_groups": 16, "group_size": 4, "straggler": "retract"}
    return config(**{**values, **changes})


def plan(
    current: Schedule,
    *,
    groups: int = 200,
    engines: int = 1,
    kv_tokens: int | None = None,
    batch_groups: int = 16,
) -> do.Plan:
    ended = tuple(
        GroupLengths.whole(index, lengths.tolist())
        for index, lengths in enumerate(drawn(groups)[:, :4])
    )
    return do.Plan(
        batch_groups=batch_groups,
        group_size=4,
        ended=ended,
        open=(),
        prompt_tokens=8.0,
        reservation=Reservation(fixed_in_full=False),
        engines=engines,
        kv_tokens=kv_tokens,
        current=current,
    )


TOLERANCE = Objective().tolerance
POOR = schedule(1.0)
"""Waits for every last response."""


@cache
def chosen(straggler: str) -> Schedule:
    """The planner's choice without any restriction."""
    best = Planner().plan(plan(POOR), rules(straggler=straggler))
    return best


@pytest.mark.parametrize("straggler", [at_length("retract"), "in_place"])
def test_no_candidate_is_better_by_more_than_the_tolerance_nor_much_fresher_and_as_good(
    straggler: str,
) -> None:
    best = chosen(straggler)
    settings = rules(straggler=straggler)
    tried_on = Planner().setting(plan(POOR), settings)
    outcomes = [
        try_out(candidate, tried_on)
        for candidate in candidates(tried_on, Space(may_defer=settings.may_defer))
    ]
    own = try_out(best, tried_on)
    most = max(o.value for o in outcomes)
    assert own.value >= (1 - TOLERANCE) * most
    # The brief trial misses a candidate that is only a little fresher, if it starts slowly.
    fresher = [o for o in outcomes if o.mean_staleness < 0.9 * own.mean_staleness]
    assert all(o.value < (1 - TOLERANCE) * most for o in fresher)
    model = tried_on.model
    assert best.forecast == Forecast(
        step_seconds=own.step_seconds,
        efficiency=own.efficiency,
        off_policy_share=own.off_policy_share,
        mean_staleness=own.mean_staleness,
        distance=own.distance,
        token_seconds=model.t1 + model.t0 / tried_on.max_running,
        read_seconds=model.t2,
    )


def test_a_choice_describes_itself() -> None:
    best = chosen("retract")
    assert best.why.startswith(in_words(best))
    assert best.forecast is not None
    assert f"{best.forecast.efficiency:.1%} of the bound" in best.why


def test_the_choice_has_no_chance_in_it() -> None:
    assert Planner().plan(plan(POOR), rules()) == chosen("retract")


def test_a_schedule_that_is_as_good_stays() -> None:
    best = chosen("retract")
    assert Planner().plan(plan(best), rules()).same_as(best)
    again = Planner().plan(plan(best, groups=190), rules())
    assert again.same_as(best), "slightly other lengths"
    assert again.why != best.why, "the forecast is renewed"


@pytest.mark.parametrize("straggler", [at_length("retract"), "in_place"])
def test_a_full_kv_pool_is_a_cost_and_no_limit(straggler: str) -> None:
    """A schedule that overflows the pool by a little may still be the fastest."""
    settings = rules(straggler=straggler)
    needs = try_out(POOR, Planner().setting(plan(POOR), settings)).peak_kv
    command = plan(POOR, kv_tokens=round(0.9 * needs))
    best = Planner().plan(command, settings)
    tried_on = Planner().setting(command, settings)
    own = try_out(best, tried_on)
    assert own.peak_kv <= 0.9 * needs, "a pool holds no more"
    outcomes = [
        try_out(candidate, tried_on)
        for candidate in candidates(tried_on, Space(may_defer=settings.may_defer))
    ]
    assert own.value >= (1 - TOLERANCE) * max(o.value for o in outcomes)
    assert own.efficiency > 1.1 * try_out(POOR, tried_on).efficiency, "and not that of waiting"


@pytest.mark.parametrize("keeps_kv", [False, True])
def test_a_smaller_pool_makes_every_schedule_slower(keeps_kv: bool) -> None:
    for candidate in (schedule(1.0), schedule(2.0), schedule(1.5, Pool(together=4))):
        speeds = [
            try_out(candidate, setting(kv_tokens=pool, keeps_kv=keeps_kv)).efficiency
            for pool in (15_000, 30_000, 60_000, None)
        ]
        assert all(less <= 1.01 * more for less, more in pairwise(speeds))
        assert speeds[0] < 0.8 * speeds[-1]
        # An engine keeps room for what a request may generate, whether it will or not.
        asked = setting(kv_tokens=30_000, keeps_kv=keeps_kv, spare_tokens=3000.0)
        assert try_out(candidate, asked).efficiency < 0.95 * speeds[1]
        # vLLM keeps none, and preempts instead.
        filled = setting(kv_tokens=30_000, keeps_kv=keeps_kv, reservation=None)
        assert 0.9 < try_out(candidate, filled).efficiency / speeds[1] < 1.01


def test_trials_follow_the_rule_of_admission() -> None:
    """Less is reserved with a smaller clip. A share that starts high after every update, and
    running requests that count in full, leave less room."""
    tight = setting(kv_tokens=15_000, spare_tokens=400.0)
    usual = try_out(schedule(2.0), tight).efficiency

    def speed(**changes: Any) -> float:
        return try_out(schedule(2.0), replace(tight, **changes)).efficiency / usual

    assert speed(reservation=Reservation(clip=40, fixed_in_full=False)) > 1.1
    assert speed(reservation=Reservation()) < 0.9
    assert speed(empties=True) < 0.995
    # With too little reserved a tight pool overflows.
    careless = Reservation(conservativeness=0.14, fixed_in_full=False)
    assert speed(empties=True, reservation=careless) < 0.97 * speed(empties=True)


@pytest.mark.parametrize("delivery", ["groups", "samples"])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_the_bound_on_staleness_is_respected(bound: int, delivery: str) -> None:
    settings = rules(max_staleness=bound, straggler="in_place", delivery=delivery)
    command = plan(schedule(3.0))
    best = Planner().plan(command, settings)
    tried_on = Planner().setting(command, settings)
    own = try_out(best, tried_on)
    assert own.too_stale_share <= 0.005
    waiting = try_out(schedule(1.0), tried_on)
    assert own.efficiency >= 0.98 * waiting.efficiency, "it is not worse than waiting"
    # No more than bound + 1 batches are admitted, whatever the schedule asks for.
    free = try_out(schedule(4.0), replace(tried_on, max_staleness=None))
    assert try_out(schedule(4.0), tried_on).mean_staleness < free.mean_staleness


@pytest.mark.parametrize(("late", "near"), [(0.004, [0]), (0.006, [0]), (0.011, [])])
def test_a_brief_trial_near_the_bound_is_continued(late: float, near: list[int]) -> None:
    halving = Halving(setting(), [schedule(1.5)])
    halving.brief[0] = outcome(0.8, 0.5, late=late)
    assert halving.near() == near
    halving.full[0] = outcome(0.8, 0.5, late=0.006)
    assert halving.near() == []


def test_the_bound_on_staleness_changes_no_other_figure() -> None:
    free, bound = (
        try_out(schedule(2.0), setting()),
        try_out(schedule(2.0), setting(max_staleness=1)),
    )
    assert bound.too_stale_share > 0 == free.too_stale_share
    assert bound.value < free.value, "what is too stale is masked, and of no use"
    assert replace(bound, too_stale_share=0.0, value=free.value) == free


@pytest.mark.parametrize(
    ("changes", "may_defer"),
    [
        ({}, True),
        ({"straggler": "abort"}, True),
        ({"max_staleness": 8}, True),
        ({"max_staleness": 7}, False),
        ({"pace": "asynchronous"}, False),
        ({"straggler": "in_place"}, False),
        ({"straggler": "run"}, False),
        ({"delivery": "samples"}, False),
    ],
    ids=str,
)
def test_length_buckets_are_the_first_schedule_only_where_rollouts_may_be_deferred(
    changes: dict[str, object], may_defer: bool
) -> None:
    settings = rules(**changes)
    assert settings.may_defer is may_defer
    driver = Driver(config(**{"straggler": "retract", **changes}))
    assert isinstance(driver.state.plan.schedule.refill, LengthBuckets) is may_defer


@pytest.mark.parametrize("may_defer", [True, False])
def test_length_buckets_are_candidates_only_where_rollouts_may_be_deferred(may_defer: bool) -> None:
    several = candidates(setting(), Space(may_defer=may_defer))
    assert any(isinstance(c.refill, LengthBuckets) for c in several) is may_defer
    tried = trials(setting(batches=4, burn_in=1), several)
    assert may_defer or not any(isinstance(t.schedule.refill, LengthBuckets) for t in tried)


@pytest.mark.parametrize(
    ("batch_groups", "engines", "scaled"),
    [
        (64, 1, (64, 1, 1000)),
        (256, 1, (64, 1, 250)),
        (256, 8, (64, 2, 1000)),
        (1000, 4, (64, 1, 256)),
    ],
)
def test_a_large_batch_is_tried_out_as_an_equal_share_of_it(
    batch_groups: int, engines: int, scaled: tuple[int, int, int]
) -> None:
    command = plan(POOR, engines=engines, kv_tokens=10**6 * engines, batch_groups=batch_groups)
    tried_on = Planner().setting(command, rules(batch_groups=batch_groups))
    found = tried_on.batch_groups, tried_on.engines, round((tried_on.kv_tokens or 0) / 1000)
    assert found == scaled
    assert tried_on.share == batch_groups / scaled[0]


@pytest.mark.parametrize("max_running", [128, 4096])
@pytest.mark.parametrize("candidate", [schedule(1.5), schedule(1.25, Pool(together=8))], ids=str)
def test_a_share_of_an_engine_does_what_the_engine_does(
    candidate: Schedule, max_running: int
) -> None:
    """A quarter of the groups on a quarter of the engine, also where one waits for the other."""
    planner = Planner(max_running=max_running)
    command = plan(POOR, groups=600, batch_groups=256, kv_tokens=10**6)
    small = planner.setting(command, rules(batch_groups=256))
    assert small.batch_groups == 64
    lengths = np.tile(small.lengths, (4, 1))
    whole = replace(
        small,
        lengths=lengths,
        batch_groups=256,
        batches=8,
        share=1.0,
        model=planner.model,
        max_running=max_running,
        kv_tokens=10**6,
        stop=None,
    )
    one, other = try_out(candidate, small), try_out(candidate, whole)
    assert one.step_seconds == pytest.approx(other.step_seconds, rel=0.02)
    assert one.efficiency == pytest.approx(other.efficiency, rel=0.02)
    assert one.value == pytest.approx(other.value, rel=0.02)
    assert one.mean_staleness == pytest.approx(other.mean_staleness, abs=0.05)


def test_a_step_of_a_share_of_an_engine_takes_as_long() -> None:
    """For a mixture of experts too: there, a quarter of the batch reads the same experts."""
    model = replace(
        H200_QWEN3_4B, fill=8.0, wide_from=256, t0_wide=1e-3, t0_experts=0.01, expert_share=1 / 16
    )
    command = plan(POOR, batch_groups=256, kv_tokens=10**6)
    tried_on = Planner(model).setting(command, rules(batch_groups=256)).model
    for batch in (4, 16, 64, 512):
        step = model.step_seconds(batch, 1000 * batch)
        assert tried_on.step_seconds(batch / 4, 250 * batch) == pytest.approx(step)
    assert tried_on.token_seconds(128) == pytest.approx(4 * model.token_seconds(512))


def test_a_pool_without_room_for_a_share_is_tried_out_whole() -> None:
    command = plan(POOR, batch_groups=256, kv_tokens=20_000)
    tried_on = Planner().setting(command, rules(batch_groups=256))
    assert (tried_on.batch_groups, tried_on.kv_tokens) == (256, 20_000)


def test_beside_a_slow_trainer_no_candidate_that_waits_for_it_is_tried() -> None:
    slow = setting(train_seconds=60.0, batches=4, burn_in=1)
    tried = trials(slow, candidates(slow, Space(may_defer=True, paces=BOTH)))
    assert {each.schedule.pace for each in tried} == {"asynchronous"}


@pytest.mark.parametrize(("gaps", "tried_on"), [(0.0, 0.0), (3.0, 3.0), (32.0, 8.0)])
def test_many_gaps_are_tried_out_as_fewer_of_the_same_time(gaps: float, tried_on: float) -> None:
    command = structs.replace(plan(POOR), gaps=gaps, gap_seconds=(2.0, 4.0) if gaps else ())
    found = Planner().setting(command, rules())
    assert found.gaps == tried_on
    assert sum(found.gap_times) * found.gaps == sum(command.gap_seconds) * gaps


def test_unfinished_groups_are_evidence_too() -> None:
    """Five long groups that have not ended make the lengths of the trials longer."""
    command = plan(POOR, groups=40)
    unfinished = tuple(
        GroupLengths(
            launched=1000 + index,
            tokens=np.full(4, 5000, dtype=np.int64),
            finished=np.zeros(4, dtype=np.bool_),
        )
        for index in range(10)
    )
    without = Planner().setting(command, rules())
    with_them = Planner().setting(structs.replace(command, open=unfinished), rules())
    assert with_them.lengths.mean() > 1.3 * without.lengths.mean()


def test_a_run_with_one_response_for_each_prompt_is_planned_too() -> None:
    driver = Driver(config(group_size=1, batch_groups=4))
    assert batches(driver, 3) == [1, 3]
    ended = tuple(GroupLengths.whole(i, [int(n)]) for i, n in enumerate(drawn(64)[:, 0]))
    command = structs.replace(plan(POOR), ended=ended, group_size=1)
    best = Planner().plan(command, rules(group_size=1))
    assert best.forecast is not None
    waiting = try_out(POOR, setting(lengths=drawn(64)[:, :1]))
    assert best.forecast.efficiency > waiting.efficiency


# --- no stale token ------------------------------------------------------------------------------


def test_without_stale_tokens_every_candidate_waits_or_settles() -> None:
    settings = rules(max_staleness=0)
    assert settings.policies.staleness == Staleness(0, rule="restart")
    space = Space(may_defer=settings.may_defer, tail=True, paces=("synchronous", "asynchronous"))
    several = candidates(setting(max_staleness=0, restarts=True), space)
    assert all(settings.settles(candidate) for candidate in several)
    assert {candidate.pace for candidate in several} == {"synchronous"}
    kinds = {type(candidate.refill) for candidate in several}
    assert kinds == {Wave, LengthBuckets, TailBatching}


def test_the_users_staleness_bound_is_kept() -> None:
    assert rules(max_staleness=Staleness(0)).policies.staleness == Staleness(0)
    assert rules(max_staleness=1).policies.staleness == Staleness(1)
    assert rules(max_staleness=0, over_provision=1.0).policies.staleness == Staleness(0)
    assert rules(max_staleness=0, straggler="in_place").policies.staleness == Staleness(0)


def test_the_core_refuses_a_schedule_of_endless_restarts() -> None:
    driver = Driver(config(straggler="retract", max_staleness=0))
    first = driver.state.plan.schedule
    assert driver.config.settles(first)
    driver.request_batch()
    for refused in (schedule(1.5), schedule(1.0, Pool(together=1)), schedule(1.5, LengthBuckets())):
        driver.feed(ev.Planned(schedule=refused))
        assert driver.state.plan.schedule == first
    driver.feed(ev.Planned(schedule=schedule(1.0)))
    assert driver.state.plan.schedule.refill == Wave()


def test_without_stale_tokens_auto_beats_waiting() -> None:
    settings = rules(max_staleness=0, group_size=8)
    lengths = drawn(400)
    ended = tuple(GroupLengths.whole(i, row.tolist()) for i, row in enumerate(lengths))
    command = structs.replace(plan(POOR), ended=ended, group_size=8)
    best = Planner().plan(command, settings)
    assert isinstance(best.refill, LengthBuckets)
    assert best.over_provision == 1.0
    assert best.forecast is not None
    assert best.forecast.off_policy_share == 0
    assert best.forecast.efficiency > 1.03 * _outcome(Planner(), command, settings).efficiency


def _outcome(planner: Planner, command: do.Plan, settings: SchedulerConfig) -> Outcome:
    return try_out(POOR, planner.setting(command, settings))


@pytest.mark.parametrize(
    "preset",
    ["on_policy", *(at_length(p) for p in ("sync", "rollpacker"))],
)
def test_a_trial_discards_what_the_simulation_discards(preset: str) -> None:
    """In both, a restarted prompt draws new lengths, which agree only in their distribution."""
    settings = PRESETS[preset](SchedulerConfig(batch_groups=16))
    summary = Summary(
        bound=partial(H200_QWEN3_4B_LINEAR.bound_seconds, max_running=512),
        burn_in=10,
    )
    engine = modelled(1_000_000)
    simulation = Simulation(settings, WORKLOAD, batches=60, engine=engine, listeners=[summary])
    simulation.run()
    policies, steady = settings.policies, steady_state(summary.batches, 10)
    assert policies.over_provision is not None
    outcome = try_out(
        Schedule(over_provision=policies.over_provision, refill=policies.refill),
        setting(
            lengths=drawn(16 * 216),
            max_staleness=policies.staleness.bound,
            restarts=policies.staleness.rule == "restart",
            batches=200,
        ),
    )
    assert outcome.efficiency == pytest.approx(steady.efficiency, rel=0.04)
    assert outcome.off_policy_share == 0
    assert outcome.distance == pytest.approx(steady.length_distance, abs=0.04)


def test_lengths_of_earlier_epochs_improve_length_buckets() -> None:
    waited = schedule(1.0, LengthBuckets(store=4.0, probe_after=0.97))
    zero = setting(max_staleness=0, restarts=True)
    first, second = (try_out(waited, replace(zero, remembered=r)) for r in (0.0, 0.9))
    assert second.efficiency > 1.03 * first.efficiency


# --- the pace ------------------------------------------------------------------------------------

BOTH: tuple[Pace, ...] = ("synchronous", "asynchronous")


def test_a_schedule_names_a_pace_only_where_it_is_chosen() -> None:
    space = Space(may_defer=True)
    assert {c.pace for c in candidates(setting(), space)} == {None}
    chosen_too = candidates(setting(), replace(space, paces=BOTH))
    assert {c.pace for c in chosen_too} == set(BOTH)
    assert not any(c.refill.defers for c in chosen_too if c.pace == "asynchronous")
    configured = candidates(setting(pace="asynchronous"), Space(may_defer=False))
    assert {c.pace for c in configured} == {None}


@pytest.mark.parametrize(("train_seconds", "pace"), [(0.0, "synchronous"), (60.0, "asynchronous")])
def test_the_trainers_time_decides_the_pace(train_seconds: float, pace: Pace) -> None:
    settings = rules(pace="auto")
    command = structs.replace(
        plan(POOR), paces=BOTH, train_seconds=train_seconds, refit_seconds=0.1
    )
    best = Planner().plan(command, settings)
    assert best.pace == pace
    assert best.forecast is not None
    if train_seconds:
        # The trainer is never idle, and no token is older than it must be for that.
        assert best.forecast.step_seconds == pytest.approx(60.1, abs=0.2)
        assert best.forecast.mean_staleness == pytest.approx(1.0, abs=0.1)
        assert f"{pace} pace" in best.why


@pytest.mark.parametrize(
    ("prompt_tokens", "places", "placement"),
    [(8.0, True, "spread"), (60_000.0, True, "prefix"), (8.0, False, None)],
)
def test_groups_are_divided_over_engines_unless_their_prompts_are_long(
    prompt_tokens: float, places: bool, placement: Placement | None
) -> None:
    command = plan(POOR, groups=100, engines=4)
    command = structs.replace(command, prompt_tokens=prompt_tokens, places=places)
    assert Planner().plan(command, rules(straggler="in_place")).placement == placement
