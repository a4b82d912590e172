"""Tests trainers that push prompts one step at a time: no schedule waits for prompts in vain."""

from __future__ import annotations

import asyncio
import itertools
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    Batch,
    MemoryStore,
    Prompt,
    PromptQueue,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
)
from aprilsched.config import Pool, Samples
from aprilsched.errors import ConfigError, PromptsExhausted
from aprilsched.fronts import blocking
from aprilsched.planning import Planner
from aprilsched.simulation.engine import run_virtual
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time

GROUPS = 4
LONG_S = 10_000
"""Limit in seconds of virtual time; nothing new happens after it."""

SCHEDULES: dict[str, dict[str, Any]] = {
    "wave": {"over_provision": 1.5},
    "a large wave": {"over_provision": 4.0},
    "pool": {"refill": Pool(together=3), "over_provision": 2.0},
    "pool with a taper": {"refill": Pool(until=0.25), "over_provision": 3.0},
    "auto": {"over_provision": "auto"},
    "staleness": {"over_provision": 2.0, "max_staleness": 0},
    "samples": {"over_provision": 2.0, "stop": Samples(2 * GROUPS)},
    "abort": {"over_provision": 2.0, "straggler": "abort"},
}
SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "buckets": {"refill": "buckets", "over_provision": 1.5},
    "auto with abort": {"over_provision": "auto", "straggler": "abort"},
}


class Source:
    """Makes prompts with responses of different lengths, and pushes them."""

    def __init__(self) -> None:
        self.queue = PromptQueue()
        self.pushed: list[int] = []
        self._keys = itertools.count()
        self._random = np.random.default_rng(3)

    def push(self, count: int) -> None:
        for _ in range(count):
            key = next(self._keys)
            tokens = int(self._random.integers(3, 80))
            sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
            ids = np.array([key + 1, 7], dtype=np.int32)
            self.queue.put(Prompt(input_ids=ids, key=key, sampling=sampling))
            self.pushed.append(key)


settings: Any = partial(SchedulerConfig, batch_groups=GROUPS, group_size=2)


def scheduler(source: Source, config: SchedulerConfig, **arguments: Any) -> RolloutScheduler:
    planner = Planner(inline=True)
    return RolloutScheduler(SimFleet(2), source.queue, config=config, planner=planner, **arguments)


def keys(batches: list[Batch]) -> list[Any]:
    return sorted(group.prompt.key for batch in batches for group in batch.groups)  # type: ignore[type-var]


@each_row(
    "changes",
    [
        *({**values, "pace": "synchronous"} for values in {**SCHEDULES, **SYNCHRONOUS}.values()),
        *({**values, "pace": "asynchronous"} for values in SCHEDULES.values()),
    ],
    ids=[
        *(f"{name}, synchronous" for name in {**SCHEDULES, **SYNCHRONOUS}),
        *(f"{name}, asynchronous" for name in SCHEDULES),
    ],
)
async def test_a_trainer_that_pushes_batch_by_batch_gets_each(changes: dict[str, Any]):
    source = Source()
    batches: list[Batch] = []
    async with asyncio.timeout(LONG_S), scheduler(source, settings(**changes)) as rollouts:
        for _ in range(5):
            source.push(GROUPS)
            batches.append(await rollouts.next_batch())
            await rollouts.update_weights(SimPublisher())
        source.queue.close()
        with pytest.raises(PromptsExhausted):
            await rollouts.next_batch()
    assert [len(batch.groups) for batch in batches] == [GROUPS] * 5
    assert keys(batches) == source.pushed


@each_row("pace", ["synchronous", "asynchronous"])
@each_row("refill", ["wave", "pool"])
async def test_prompts_that_come_one_by_one_fill_a_batch_that_waits(pace: str, refill: str):
    source = Source()

    async def trickle() -> None:
        for _ in range(9):
            await asyncio.sleep(7)
            source.push(1)
        source.queue.close()

    config = settings(pace=pace, refill=refill, over_provision=2.0)
    async with asyncio.timeout(LONG_S), scheduler(source, config) as rollouts:
        pushing = asyncio.create_task(trickle())
        batches = [batch async for batch in rollouts]
        await pushing
    assert [len(batch.groups) for batch in batches] == [GROUPS, GROUPS, 1]
    assert keys(batches) == source.pushed


def test_a_group_that_fails_is_replaced_when_more_prompts_come():
    source = Source()

    async def reward(rollout: Any, prompt: Prompt) -> float:
        if prompt.key == 1:
            raise ValueError("no reward")
        return 1.0

    async def program() -> Batch:
        config = settings(over_provision=1.0)
        async with (
            asyncio.timeout(LONG_S),
            scheduler(source, config, reward=reward) as rollouts,
        ):
            source.push(GROUPS)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(100):
                    await rollouts.next_batch()
            source.push(1)
            return await rollouts.next_batch()

    assert keys([run_virtual(program())]) == [0, 2, 3, 4]


async def test_closing_does_not_wait_for_prompts_and_loses_none():
    source = Source()
    async with asyncio.timeout(LONG_S), scheduler(source, settings()) as rollouts:
        source.push(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await rollouts.next_batch()
    source.push(2)  # the event loop that was waited on is closed
    assert len(source.queue) == 2


def test_prompts_are_taken_in_order_and_none_after_the_end():
    source = Source()
    source.push(3)
    source.queue.close()
    source.queue.close()
    with pytest.raises(ConfigError, match="closed; push before"):
        source.push(1)

    async def taken() -> list[Any]:
        return [prompt.key async for prompt in source.queue]

    assert asyncio.run(taken()) == [0, 1, 2]


def test_a_resumed_run_continues_with_the_next_prompts():
    source, store = Source(), MemoryStore()

    async def program(count: int) -> list[Batch]:
        async with (
            asyncio.timeout(LONG_S),
            scheduler(source, settings(over_provision=1.0), store=store) as rollouts,
        ):
            assert rollouts.state.prompts.cursor == len(source.pushed)
            batches: list[Batch] = []
            for _ in range(count):
                source.push(GROUPS)
                batches.append(await rollouts.next_batch())
                batches[-1].acknowledge()
            return batches

    first = run_virtual(program(2))
    again = run_virtual(program(2))
    assert keys([*first, *again]) == source.pushed


async def test_any_thread_may_push_and_the_blocking_scheduler_takes():
    """Every prompt arrives once, however the threads interleave."""
    queue = PromptQueue()
    config = settings(over_provision=1.5, sampling=SamplingParams(max_new_tokens=3))

    def push(start: int) -> None:
        for key in range(start, start + 40):
            queue.put(Prompt(input_ids=np.array([key + 1], dtype=np.int32), key=key))

    def train() -> list[Batch]:
        fleet = SimFleet(2, time_scale=0.001)
        with blocking.RolloutScheduler(fleet, queue, config=config) as rollouts:
            threads = [threading.Thread(target=push, args=(start,)) for start in (0, 40, 80)]
            for thread in threads:
                thread.start()
            batches = [rollouts.next_batch()]
            for thread in threads:
                thread.join()
            queue.close()
            return [*batches, *rollouts]

    batches = await asyncio.to_thread(train)
    assert keys(batches) == list(range(120))
