"""Tests prompts with group sizes of their own: in batches, evaluations, the store and the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    Batch,
    Group,
    MemoryStore,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
    SqliteStore,
)
from aprilsched.__main__ import main
from aprilsched.config import Groups, Samples, Stop, Tokens
from aprilsched.errors import ConfigError
from aprilsched.observe.log.lengths_of_run import known_lengths
from aprilsched.planning import Planner
from aprilsched.simulation.engine import run_virtual
from tests.support import small
from tests.support.driver import Driver, config
from tests.support.table import each_row

SIZES = (1, None, 5)
USUAL = 2
"""The group size of the configuration."""


def expected(key: int) -> int:
    return SIZES[key % len(SIZES)] or USUAL


def prompts(count: int = 10_000) -> Iterator[Prompt]:
    random = np.random.default_rng(5)
    for key in range(count):
        sampling = tuple(
            SamplingParams(max_new_tokens=int(n), ignore_eos=True)
            for n in random.integers(3, 60, expected(key))
        )
        yield Prompt(
            input_ids=np.array([key + 1, 7], dtype=np.int32),
            key=key,
            sampling=sampling,
            group_size=SIZES[key % len(SIZES)],
        )


def check(batches: list[Batch]) -> None:
    keys = [group.prompt.key for batch in batches for group in batch.groups]
    assert len(set(keys)) == len(keys)
    for batch in batches:
        for group in batch.groups:
            assert isinstance(group.prompt.key, int)
            assert len(group.rollouts) == expected(group.prompt.key)
            assert [rollout.index for rollout in group.rollouts] == list(range(len(group.rollouts)))
    assert {expected(key) for key in keys if isinstance(key, int)} == {1, USUAL, 5}


async def run(
    count: int, settings: dict[str, Any], *, updates: bool = True, **arguments: Any
) -> list[Batch]:
    scheduler = RolloutScheduler(
        SimFleet(2),
        prompts(),
        config=small.config(**{"group_size": USUAL, **settings}),
        planner=Planner(inline=True),
        **arguments,
    )
    batches: list[Batch] = []
    async with scheduler as rollouts:
        for _ in range(count):
            batches.append(await rollouts.next_batch())
            if updates:
                await rollouts.update_weights(SimPublisher())
    return batches


@each_row("stop", [Groups(4), Samples(9), Tokens(200)], ids=lambda stop: stop.name)
@each_row(
    "settings",
    [
        {"refill": "wave"},
        {"refill": "pool", "pace": "asynchronous", "max_staleness": 1},
        {"refill": "buckets", "straggler": "abort"},
        {"over_provision": "auto"},
    ],
    ids=["wave", "pool", "buckets", "auto"],
)
def test_every_rule_delivers_whole_groups_of_their_own_size(settings: dict[str, Any], stop: Stop):
    batches = run_virtual(run(6, {**settings, "stop": stop}))
    check(batches)
    for batch in batches:
        counted = {
            "groups": len(batch.groups),
            "samples": sum(1 for _ in batch.rollouts),
            "tokens": batch.tokens,
        }[stop.name]
        assert counted >= stop.amount


def test_group_rewards_have_the_group_size_of_their_prompt():
    async def reward(group: Group) -> list[float]:
        assert isinstance(group.prompt.key, int)
        return [float(group.prompt.key)] * len(group.rollouts)

    async def program() -> Batch:
        scheduler = RolloutScheduler(
            SimFleet(1),
            prompts(),
            reward=reward,
            reward_scope="group",
            config=SchedulerConfig(batch_groups=3, group_size=USUAL, over_provision=1.0),
        )
        async with scheduler as rollouts:
            check([await rollouts.next_batch()])
            ids, few = np.array([3], dtype=np.int32), SamplingParams(max_new_tokens=4)
            own = Prompt(input_ids=ids, sampling=few, group_size=3, key=1)
            other = Prompt(input_ids=ids, sampling=few, key=2)
            return await rollouts.evaluate([own, other], group_size=2)

    assert [len(group.rollouts) for group in run_virtual(program()).groups] == [3, 2]


@each_row("kind", ["memory", "sqlite"])
def test_a_restart_keeps_the_sizes(kind: str, tmp_path: Path):
    store = MemoryStore() if kind == "memory" else SqliteStore(tmp_path / "s", inline=True)
    first = run_virtual(run(3, {}, updates=False, store=store))
    batches = run_virtual(run(9, {"refill": "pool"}, updates=False, store=store))
    check(batches)
    assert [batch.redelivered for batch in batches] == [True] * 3 + [False] * 6
    assert [r.rollout_id for r in batches[0].rollouts] == [r.rollout_id for r in first[0].rollouts]


def test_the_log_records_the_sizes_of_groups(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {
            "input_ids": [1, 2],
            "sampling": {"max_new_tokens": 5 + key, "ignore_eos": True},
            **({} if SIZES[key % 3] is None else {"group_size": SIZES[key % 3]}),
        }
        for key in range(12)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "run"
    common = ["--batch-groups", "4", "--group-size", str(USUAL), "--quiet", "--no-report"]
    arguments = ["--prompts", str(file), "--batches", "3", "--out", str(out)]
    assert main(["run", *common, *arguments]) == 0
    sizes = [len(group.tokens) for group in known_lengths(out)]
    assert sizes == [expected(key) for key in range(12)]


@each_row(
    ("size", "text"),
    [(0, "None, got 0"), (True, "group_size is True"), (1.5, "1.5"), ("2", "a whole number")],
)
def test_an_invalid_group_size_is_refused(size: Any, text: str):
    with pytest.raises(ConfigError, match=text):
        Prompt(input_ids=np.array([1], dtype=np.int32), group_size=size)


def test_samples_are_filled_by_the_size_that_groups_really_have():
    """With the configured size three groups seem to be enough; they have one rollout each."""
    driver = Driver(
        config(
            batch_groups=3,
            group_size=4,
            over_provision=1.0,
            pace="synchronous",
            stop=Samples(12),
        ),
    )
    driver.sizes = (1,)
    driver.request_batch()
    assert driver.state.in_flight.counters.launched == 3
    while driver.state.in_flight.counters.launched == 3:
        driver.finish(driver.attempts()[0])
    assert driver.state.in_flight.counters.launched == 12
    while driver.sends:
        driver.finish(driver.attempts()[0])
    assert [len(batch.groups) for batch in driver.batches] == [12]
