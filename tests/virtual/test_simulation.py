"""Compares the heap simulation with the real coordinator on a virtual clock.

The figures of ``simulate`` are right only if both shells around the core do the same at the same
modelled time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from aprilsched.config import Dispatch, LengthBuckets, Pool, Refill, SchedulerConfig
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages.commands import Command
from aprilsched.kernel.core.messages.events import Event, Opened
from aprilsched.kernel.core.policies.refill import PoolView
from aprilsched.kernel.shell import RolloutScheduler
from aprilsched.planning.presets import april, copris, sync
from aprilsched.simulation import Costs, Simulation, compare, simulate
from aprilsched.simulation.engine import SimConfig, SimFleet, SimPublisher, run_virtual
from aprilsched.simulation.workload import Empirical, LongTailWorkload
from aprilsched.types import Rollout
from tests.support import small
from tests.support.table import each_row

WORKLOAD = LongTailWorkload(median=60, cap=600, group_size=4, seed=3)
MODEL = SimConfig(make_tokens=False, max_running=32, kv_tokens=20_000, stream_interval=64)
BATCHES = 6

Delivered = tuple[float, list[tuple[int, int, list[tuple[int, int, int]]]]]


class Deliveries:
    """A listener that records when each batch is delivered, and the versions of its responses.

    Times are since the opening, in which only the coordinator has engines to flush.
    """

    def __init__(self) -> None:
        self.seen: list[Delivered] = []
        self._opened = 0.0

    def on_event(self, event: Event, now: float) -> None:
        if isinstance(event, Opened):
            self._opened = now

    def on_command(self, command: Command, now: float) -> None:
        if isinstance(command, do.Deliver):
            rows = [
                (r.rollout_id, len(r), [(s.start, s.end, s.version) for s in r.segments])
                for r in command.batch.rollouts
            ]
            self.seen.append((now - self._opened, rows))


class Responses:
    """A listener that records delivered responses, and the limit of each request in tokens from
    the start of its response."""

    def __init__(self) -> None:
        self.rollouts: list[Rollout] = []
        self.limits: set[int] = set()

    def on_event(self, event: Event, now: float) -> None:
        pass

    def on_command(self, command: Command, now: float) -> None:
        if isinstance(command, do.Send):
            done = len(command.input_ids) - WORKLOAD.prompt_tokens
            self.limits.add(command.sampling.max_new_tokens + done)
        elif isinstance(command, do.Deliver):
            self.rollouts += command.batch.rollouts


config = partial(small.config, batch_groups=8, dispatch=Dispatch(rate=10**9))


def on_the_virtual_clock(
    settings: SchedulerConfig, engines: int, dp_ranks: int = 1
) -> list[Delivered]:
    deliveries = Deliveries()

    async def run() -> None:
        fleet = SimFleet(
            engines,
            dp_ranks=dp_ranks,
            max_running=MODEL.max_running,
            kv_tokens=MODEL.kv_tokens,
            stream_interval=MODEL.stream_interval,
        )
        async with RolloutScheduler(
            fleet, WORKLOAD, config=settings, listeners=[deliveries], run_id="run"
        ) as rollouts:
            for _ in range(BATCHES):
                await rollouts.next_batch()
                await rollouts.update_weights(SimPublisher())

    run_virtual(run())
    return deliveries.seen


def on_the_heap(settings: SchedulerConfig, engines: int, dp_ranks: int = 1) -> list[Delivered]:
    deliveries, engine = Deliveries(), replace(MODEL, dp_ranks=dp_ranks)
    Simulation(
        settings, WORKLOAD, engines=engines, engine=engine, batches=BATCHES, listeners=[deliveries]
    ).run()
    return deliveries.seen


@each_row(
    ("changes", "dp_ranks"),
    [
        ({"over_provision": 1.0}, 1),
        ({"over_provision": 1.0}, 3),
        ({"straggler": "in_place", "refill": "pool"}, 1),
        ({"straggler": "run"}, 1),
    ],
    ids=str,
)
def test_both_shells_do_the_same(changes: dict[str, object], dp_ranks: int) -> None:
    settings = config(**changes)
    virtual = on_the_virtual_clock(settings, 1, dp_ranks)
    heap = on_the_heap(settings, 1, dp_ranks)
    assert [rows for _, rows in heap] == [rows for _, rows in virtual]
    assert [now for now, _ in heap] == pytest.approx([now for now, _ in virtual], rel=1e-6)


def test_even_ranks_take_the_time_of_one_and_uneven_ones_longer() -> None:
    even = LongTailWorkload(distribution=Empirical((100,)), cap=100)

    def seconds(groups: int, size: int, **changes: Any) -> float:
        settings = sync(SchedulerConfig(batch_groups=groups, group_size=size))
        result = simulate(even, settings, engine=replace(MODEL, **changes), batches=1, burn_in=0)
        return result.summary.seconds.wall

    assert seconds(2, 2, dp_ranks=2) == seconds(2, 1)
    assert seconds(3, 1, dp_ranks=2) == seconds(2, 1)
    assert seconds(5, 1, dp_ranks=2) == seconds(3, 1) > seconds(4, 1, dp_ranks=2)


@each_row(
    ("changes", "engines"),
    [
        ({"straggler": "retract"}, 1),
        ({"straggler": "abort"}, 1),
        ({"pace": "asynchronous", "max_staleness": 2}, 1),
        ({"batch_groups": 32}, 4),
    ],
    ids=str,
)
def test_both_shells_take_as_long(changes: dict[str, object], engines: int) -> None:
    """In the coordinator a wave arrives some loop iterations after the continue call, in its own
    prefill pass; in the simulation it arrives in the same pass. So the runs are similar, not
    equal."""
    settings = config(**changes)
    virtual, heap = on_the_virtual_clock(settings, engines), on_the_heap(settings, engines)
    assert heap[-1][0] == pytest.approx(virtual[-1][0], rel=0.05)


@each_row(
    "changes",
    [
        {"over_provision": 1.0},
        {"straggler": "retract"},
        {"straggler": "abort"},
        {"straggler": "in_place", "refill": "pool", "over_provision": 1.5},
        {"refit": "rolling", "pace": "asynchronous", "straggler": "run"},
        {"delivery": "samples", "siblings": 2},
        {"over_provision": "auto"},
    ],
    ids=str,
)
def test_every_schedule_has_the_same_responses(changes: dict[str, object]) -> None:
    """No request shows its length by its limit. The KV pool is full, so some are preempted."""
    found = Responses()
    settings = config(**changes)
    tight = replace(MODEL, kv_tokens=4_000)
    Simulation(
        settings, WORKLOAD, engines=2, engine=tight, batches=BATCHES, listeners=[found]
    ).run()
    assert len(found.rollouts) >= BATCHES * 8 * 4
    assert found.limits == {WORKLOAD.cap}
    numbers = {WORKLOAD.prompt(i).input_ids.tobytes(): i for i in range(200)}
    for rollout in found.rollouts:
        lengths = WORKLOAD.lengths(numbers[rollout.prompt_ids.tobytes()])
        assert len(rollout) == lengths[rollout.index]
        assert rollout.finish_reason == ("length" if len(rollout) == WORKLOAD.cap else "stop")


def test_a_pool_smaller_than_a_limit_is_named() -> None:
    """Each request reserves the cap, whatever its length."""
    small_pool = replace(MODEL, kv_tokens=500)
    with pytest.raises(ConfigError, match="need 608 tokens of KV cache and the engine has 500"):
        simulate(WORKLOAD, config(), engine=small_pool, batches=2)


def test_the_same_run_twice_is_the_same() -> None:
    assert on_the_heap(config(), 3) == on_the_heap(config(), 3)


def test_no_engine_draws_the_whole_wave_after_a_pause() -> None:
    settings = config(batch_groups=32)
    simulation = Simulation(settings, WORKLOAD, engines=8, engine=MODEL, batches=BATCHES)
    simulation.run()
    generated = [engine.batcher.counters.generated for engine in simulation.engines.values()]
    assert max(generated) < 1.5 * min(generated)


def test_carried_contexts_are_spread_over_all_engines() -> None:
    """Requests wait until all engines are back. Otherwise the first one would get all carried
    requests."""
    settings = config(batch_groups=32, refill="buckets", over_provision=1.5)
    simulation = Simulation(settings, WORKLOAD, engines=4, engine=MODEL, batches=BATCHES)
    simulation.run()
    prefilled = [engine.batcher.counters.prefilled for engine in simulation.engines.values()]
    assert max(prefilled) < 1.5 * min(prefilled)


@each_row(
    ("costs", "longer"),
    [
        (Costs(train_seconds=2.0), 2.0),
        (Costs(refit_seconds=1.5), 1.5),
        (Costs(reward_seconds=0.5), 0.5),
    ],
    ids=["trainer", "refit", "reward"],
)
def test_every_cost_is_paid_once_a_batch(costs: Costs, longer: float) -> None:
    free, dear = Deliveries(), Deliveries()
    settings = config(over_provision=1.0)
    for deliveries, paid in ((free, Costs()), (dear, costs)):
        Simulation(
            settings, WORKLOAD, engine=MODEL, costs=paid, batches=4, listeners=[deliveries]
        ).run()
    extra = dear.seen[-1][0] - free.seen[-1][0]
    # The last batch is delivered before its own training and refit, but after its reward.
    times = 4 if costs.reward_seconds else 3
    assert extra == pytest.approx(times * longer, rel=0.01)


def test_busy_engines_generate_in_proportion_to_their_speed() -> None:
    timing = MODEL.timing
    slow = replace(MODEL, timing=replace(timing, t0=4 * timing.t0, t1=4 * timing.t1))
    settings = config(refill=Pool(together=1), over_provision=3.0, pace="asynchronous")
    simulation = Simulation(settings, WORKLOAD, engines=2, engine=[MODEL, slow], batches=BATCHES)
    simulation.run()
    fast, late = [engine.batcher.counters for engine in simulation.engines.values()]
    assert fast.decode_seconds / fast.steps < 0.5 * late.decode_seconds / late.steps
    assert fast.generated > 1.5 * late.generated


def test_the_end_of_the_prompts_ends_the_run() -> None:
    few = LongTailWorkload(median=60, cap=600, group_size=4, count=10)
    simulation = Simulation(config(), few, engine=MODEL, batches=BATCHES)
    simulation.run()
    assert simulation.state.in_flight.counters.delivered == 40


@pytest.mark.long
def test_batches_of_similar_length_are_far_from_the_law() -> None:
    """The distance of each batch from the distribution, compared with that of a random batch.
    Batches of length buckets are all short or all long."""
    workload = LongTailWorkload(within_group=0.9, median=200.0, cap=2000)
    first = april(SchedulerConfig(batch_groups=32, group_size=8))
    policies = [first, replace(first, refill=LengthBuckets(), over_provision=1.25)]
    results = [simulate(workload, each, batches=24, burn_in=8) for each in policies]
    waves, buckets = (result.summary.steady_state for result in results)
    assert waves.length_distance is not None
    assert waves.iid_length_distance is not None
    assert buckets.length_distance is not None
    assert buckets.iid_length_distance is not None
    assert waves.length_distance < 1.35 * waves.iid_length_distance
    assert buckets.length_distance > 1.8 * buckets.iid_length_distance


def test_a_result_has_the_arrays_of_its_run() -> None:
    config = april(SchedulerConfig(batch_groups=8, group_size=4))
    result = simulate(LongTailWorkload(median=60, cap=600), config, engines=2, batches=12, seed=3)
    summary = result.summary
    assert result.step_s.shape == result.tokens.shape == result.staleness.shape == (12,)
    assert result.tokens.sum() == summary.tokens.delivered == result.lengths.sum()
    assert result.lengths.shape == result.batch.shape == (12 * 32,)
    assert result.off_policy.sum() / result.tokens.sum() == summary.off_policy_token_share
    assert result.step_s.sum() == pytest.approx(summary.seconds.wall, rel=0.05)
    assert result.usage is not None
    assert result.usage.seconds.sum() == pytest.approx(2 * result.usage.wall)


@each_row(
    ("given", "sentence"),
    [
        ({"engines": 0}, "engines is 0; give 1 or more."),
        ({"engines": 1.5}, "engines is 1.5 (float); give a whole number."),
        ({"batches": 0}, "batches is 0; give 1 or more."),
        ({"update_every": -1}, "update_every is -1; give 0 or more."),
        ({"burn_in": -1}, "burn_in is -1; give 0 or more."),
        ({"seed": 0.5}, "seed is 0.5 (float); give a whole number."),
        ({"config": april}, "config is april; give april(config), which is a SchedulerConfig."),
        ({"config": "slime"}, "config is 'slime' (str); give slime(config)"),
        ({"engine": [MODEL, MODEL], "engines": 3}, "3 engines and settings for 2; give one"),
        ({"train_seconds": "one"}, "train_seconds is 'one'; give a finite number, 0 or more."),
        ({"train_seconds": -1.0}, "train_seconds is -1.0; give a finite number, 0 or more."),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_setting_that_cannot_be_used_is_named(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        simulated(**given)


@dataclass(frozen=True)
class Never(Refill):
    """A rule that starts nothing."""

    name: ClassVar[str] = "never"

    def launches(self, view: PoolView) -> int:
        return 0

    def describe(self, ratio: str) -> str:
        return f"nothing of {ratio} batches"


def test_a_refill_rule_that_starts_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match="refill 'never' must be at least 1"):
        simulated(config=SchedulerConfig(refill=Never()))


def test_a_cap_that_cuts_many_off_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    simulated()
    assert "cut off" not in caplog.text
    simulated(workload=replace(WORKLOAD, cap=50))
    assert "of the responses are cut off at the cap of 50 tokens" in caplog.text
    caplog.clear()
    simulated(workload=replace(WORKLOAD, distribution=Empirical((30, 50)), cap=50))
    assert "cut off" not in caplog.text, "a response as long as the longest of the list is complete"


def simulated(train_seconds: Any = 0.0, **given: Any) -> None:
    settings: dict[str, Any] = {"workload": WORKLOAD, "config": config(), "batches": 1}
    settings |= {"costs": Costs(train_seconds=train_seconds), **given}
    simulate(**settings)


def test_step_efficiency_includes_waits_for_the_trainer() -> None:
    """Engines that wait for a trainer are as efficient as without one. By efficiency alone, a
    synchronous policy would rank above one with twice the throughput."""
    base = SchedulerConfig(batch_groups=8, group_size=4)
    policies = {"sync": sync(base), "april": april(base), "copris": copris(base)}
    policies["apart"] = replace(policies["copris"], pace="asynchronous")
    costs = Costs(train_seconds=10.0)
    workload = LongTailWorkload(median=200, cap=2000)
    results = {
        name: simulate(workload, policy, costs=costs, batches=16, usage=False)
        for name, policy in policies.items()
    }
    found = compare(results)
    assert found.fastest == found.best == "apart"
    assert found.baseline == "sync"
    rows = {row.policy: row for row in found.policies}
    assert (rows["april"].efficiency or 0.0) > (rows["apart"].efficiency or 0.0)
    assert (rows["apart"].step_efficiency or 0.0) > (rows["april"].step_efficiency or 0.0)
    for name, result in results.items():
        row, steps = rows[name], result.step_s[4:]
        assert row.step_s == pytest.approx(steps.mean())
        assert row.step_p10 == pytest.approx(np.percentile(steps, 10))
        assert row.step_p90 == pytest.approx(np.percentile(steps, 90))
        assert row.delivered_tokens_per_s == pytest.approx(result.tokens[4:].sum() / steps.sum())
    least = [(rows[name].step_p10 or 0.0) >= 10.0 for name in policies]
    assert all(least), "no step of this trainer is shorter than its own time"


def test_a_simulation_has_rewards_filters_tools_and_speeds() -> None:
    engines = [replace(MODEL, max_running=8), MODEL]
    result = simulate(
        WORKLOAD,
        SchedulerConfig(batch_groups=4, group_size=4),
        engines=2,
        engine=engines,
        costs=Costs(train_seconds=1.0, reward_seconds=2.0, refit_seconds=0.5),
        batches=6,
        accept=lambda group: group.rollouts[0].group_id % 3 != 0,
        pauses=lambda prompt, index: [5.0] * (index % 2),
    )
    assert result.summary.batches == 6
    assert result.summary.rollouts.dropped
    assert result.summary.efficiency is None, "no bound is known for engines that differ"
    assert result.summary.seconds.wall > 6 * (1.0 + 2.0 + 0.5)
