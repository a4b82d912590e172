"""Tests that the parts of the engines' time add up to the wall time and have the right causes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    LongTailWorkload,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
    Turn,
)
from aprilsched.kernel.core.messages.events import EngineLost
from aprilsched.observe.figures.engine_time import BUSY, PARTS
from aprilsched.observe.figures.run_state import RunState
from aprilsched.observe.log.usage import RunUsage, UsageRecorder
from aprilsched.simulation import Costs, SimConfig, simulate
from aprilsched.simulation.engine import run_virtual
from aprilsched.simulation.virtual import TIMED
from tests.support.small import config, workload
from tests.support.table import each_row

Program = Callable[[RolloutScheduler], Coroutine[Any, Any, None]]


def check(usage: RunUsage) -> dict[str, float]:
    """Check that all parts add up in every split; return the seconds of all engines by part."""
    assert usage.wall > 0
    for row, edges in zip(usage.seconds, usage.edges, strict=True):
        assert (row >= -1e-9).all()
        assert row.sum() == pytest.approx(edges[-1] - edges[0])
        assert edges[-1] == pytest.approx(usage.wall)
    assert sum(usage.shares.values()) == pytest.approx(1)
    for bins in (1, 7, 100):
        series = usage.series(bins)
        assert (series >= -1e-9).all()
        assert series.sum(axis=0) == pytest.approx(usage.seconds)
    whole = usage.series(10)
    present = usage.edges[0][0] <= 1e-9
    assert not present or whole[:, 0].sum(axis=1) == pytest.approx(usage.wall / 10)
    return dict(zip(PARTS, usage.seconds.sum(axis=0).tolist(), strict=True))


def run(program: Program, *, fleet: SimFleet | None = None, **arguments: Any) -> dict[str, float]:
    """Return the seconds of each part in a run, which must be equal live and afterwards."""
    settings = config(**arguments.pop("config", {}))
    live = RunState(batch_units=4)
    recorder = UsageRecorder(batch_units=4)

    async def whole() -> float:
        async with RolloutScheduler(
            fleet or SimFleet(2, stream_interval=8),
            arguments.pop("prompts", None) or workload(),
            config=settings,
            listeners=[live, recorder],
            **arguments,
        ) as rollouts:
            await program(rollouts)
            return asyncio.get_running_loop().time()

    end = run_virtual(whole())
    live.advance(end)
    usage = recorder.usage(end)
    seconds = check(usage)
    for index, engine in enumerate(live.engines.values()):
        assert engine.wall == pytest.approx(usage.seconds[index].sum())
        assert engine.tokens == usage.tokens[index]
        assert engine.capacity == usage.capacity[index]
    # Live figures divide time by the slots known so far, which may be fewer.
    spent = live.seconds()
    busy = sum(spent[part] for part in BUSY)
    assert busy / sum(spent.values()) >= usage.utilization * 0.999
    return seconds


async def train(rollouts: RolloutScheduler) -> None:
    for _ in range(4):
        await rollouts.next_batch()
        await rollouts.update_weights(SimPublisher())


def test_a_slow_reward():
    async def score(rollout: Rollout, prompt: Prompt) -> float:
        await asyncio.sleep(50)
        return 1.0

    seconds = run(train, reward=score, config={"over_provision": 1.0})
    assert seconds["rewards"] / 2 == pytest.approx(4 * 50, rel=0.1)


def test_a_slow_source_of_prompts():
    async def slow() -> AsyncGenerator[Prompt]:
        for index in range(1_000):
            await asyncio.sleep(10)
            yield workload().prompt(index)

    seconds = run(train, prompts=slow(), config={"over_provision": 1.0})
    # Four prompts per batch; time with requests in flight is not waiting time.
    assert seconds["prompts"] / 2 == pytest.approx(4 * 4 * 10, rel=0.1)


@each_row("pace", ["synchronous", "asynchronous"])
def test_a_slow_trainer(pace: str):
    async def slowly(rollouts: RolloutScheduler) -> None:
        for _ in range(4):
            await rollouts.next_batch()
            await asyncio.sleep(200)
            await rollouts.update_weights(SimPublisher())

    seconds = run(slowly, config={"pace": pace, "ready_batches": 1})
    # An asynchronous run generates a batch ahead in this time.
    least = 0.95 if pace == "synchronous" else 0.7
    assert least * 4 * 200 < seconds["trainer"] / 2 <= 4 * 200 * 1.001


def test_a_trainer_that_uses_the_memory_of_sleeping_engines():
    async def colocated(rollouts: RolloutScheduler) -> None:
        for _ in range(3):
            await rollouts.next_batch()
            async with rollouts.asleep():
                await asyncio.sleep(30)
            await rollouts.update_weights(SimPublisher())

    seconds = run(colocated)
    assert seconds["asleep"] / 2 == pytest.approx(90, rel=0.02)


def test_tools_of_episodes():
    async def talk(turn: Turn, prompt: Prompt) -> float:
        sampling = SamplingParams(max_new_tokens=50, ignore_eos=True)
        first = await turn.generate(prompt.input_ids, sampling)
        await asyncio.sleep(100)
        await turn.generate([*prompt.input_ids, *first.token_ids, 7], sampling)
        return 1.0

    prompts = [Prompt(input_ids=np.array([i + 1, 2], dtype=np.int32)) for i in range(200)]
    fleet = SimFleet(2, stream_interval=8, max_running=8)
    seconds = run(train, prompts=prompts, episode=talk, config={"over_provision": 1.0}, fleet=fleet)
    assert seconds["environment"] / 2 == pytest.approx(4 * 100, rel=0.1)


def test_an_engine_that_is_lost():
    async def lose(rollouts: RolloutScheduler) -> None:
        await rollouts.next_batch()
        await rollouts.update_weights(SimPublisher())
        rollouts._feed(EngineLost(engine="sim-1", cause="burnt"))
        await rollouts.next_batch()

    assert run(lose)["lost"] > 0


def test_evaluations_are_work():
    async def evaluate(rollouts: RolloutScheduler) -> None:
        await rollouts.next_batch()
        long = workload(median=600, sigma=0.1, cap=900)
        await rollouts.evaluate([long.prompt(i) for i in range(4)], group_size=4)

    seconds = run(evaluate)
    assert seconds["trainer"] < 0.01 * sum(seconds.values())


def simulated(engine: SimConfig, *, in_flight: float = 2.0) -> RunUsage:
    """Run a wave with retracts and updates on one engine; return its usage."""
    found = simulate(
        LongTailWorkload(seed=0, median=100, cap=700),
        SchedulerConfig(batch_groups=8, over_provision=in_flight),
        engine=engine,
        batches=5,
        costs=Costs(train_seconds=1.0),
    )
    assert found.usage is not None
    assert found.summary.tokens.reprefilled > 1000
    return found.usage


def test_causes_do_not_depend_on_the_stream_interval():
    each, usual, never = (
        simulated(replace(TIMED, stream_interval=interval)).shares for interval in (1, 64, 2**31)
    )
    assert each["re_prefill"] > 0.001
    assert usual == pytest.approx(each, abs=1e-6)
    assert never == pytest.approx(each, abs=1e-6)


def test_the_slots_of_two_runs_are_the_requests_an_engine_runs():
    limit = replace(TIMED, max_running=200)
    few, many = simulated(limit, in_flight=1.25), simulated(limit, in_flight=4.0)
    assert few.capacity == many.capacity == (200,)
    # Requests beyond the limit count as slots of their own, and no slot counts twice.
    check(many)
    assert many.shares["decode"] > 1.3 * few.shares["decode"]
