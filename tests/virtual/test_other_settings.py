"""Tests that a killed run resumes under settings other than those it started with.

The first process is killed before its first batch, within a batch, and while the trainer trains.
The second process resumes from the store. It must deliver, lose nothing, and deliver nothing twice.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from aprilsched import (
    Batch,
    Group,
    LongTailWorkload,
    MemoryStore,
    Prompt,
    Rollout,
    RolloutScheduler,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
)
from aprilsched.config import Dispatch, LengthBuckets, Samples, Staleness, Tokens
from aprilsched.errors import ConfigError
from aprilsched.kernel.core.invariants import check as check_invariants
from aprilsched.simulation.engine import run_virtual
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time


async def reward(rollout: Rollout, prompt: Prompt) -> float:
    await asyncio.sleep(1.5)
    return 1.0


async def group_reward(group: Group) -> list[float]:
    await asyncio.sleep(1.5)
    return [2.0] * len(group.rollouts)


async def accept(group: Group) -> bool:
    await asyncio.sleep(0.7)
    return len(group.rollouts[0].token_ids) % 3 > 0


FINISH = {"max_staleness": Staleness(1, rule="finish")}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"refill": LengthBuckets(store=3.0)},
    "pool": {"refill": "pool"},
    "auto": {"over_provision": "auto"},
    "in place": {"straggler": "in_place", "over_provision": 2.0},
    "abort apart": {"straggler": "abort", "kv_after_refit": "apart"},
    "tail": {"refill": "tail"},
    "on policy": {
        "refill": LengthBuckets(store=3.0, probe_after=0.5),
        "over_provision": 1.0,
        "max_staleness": Staleness(0, rule="restart"),
    },
    "tail restart": {"refill": "tail", "max_staleness": Staleness(0, rule="restart")},
    "asynchronous": {"pace": "asynchronous"},
    "asynchronous pool": {"pace": "asynchronous", "refill": "pool", **FINISH},
    "evict": {"max_staleness": Staleness(1, rule="evict")},
    "large batch": {"batch_groups": 11},
    "small batch": {"batch_groups": 1},
    "samples": {"stop": Samples(30)},
    "asynchronous tokens": {"stop": Tokens(3000), "pace": "asynchronous"},
    "buckets tokens": {"stop": Tokens(2000), "refill": "buckets"},
    "pairs": {"group_size": 2},
    "reward of groups": {"reward": group_reward, "reward_scope": "group"},
    "accept rewarded": {"accept": accept, "reward": reward},
}
_USER = ("reward", "reward_scope", "accept")
MOMENTS = ("before the first batch", "within a batch", "in the trainer's pause")


def scheduler(name: str, store: MemoryStore, **more: Any) -> RolloutScheduler:
    settings = SETTINGS[name] | more
    user = {key: settings.pop(key) for key in _USER if key in settings}
    values: dict[str, Any] = {"batch_groups": 4, "group_size": 4, "save_interval_s": 0.05}
    config = SchedulerConfig(**{**values, **settings})
    prompts = LongTailWorkload(
        median=60, cap=400, group_size=config.group_size, vocab_size=1000, seed=5
    )
    return RolloutScheduler(SimFleet(1), prompts, config=config, store=store, **user)


@dataclass(frozen=True)
class Killed:
    store: MemoryStore
    acknowledged: frozenset[int]
    """Rollouts that will not be delivered again."""


@cache
def killed(name: str) -> dict[str, Killed]:
    """Return a copy of the run for each moment at which the first process is killed."""
    left: dict[str, Killed] = {}

    async def live() -> None:
        store = MemoryStore()
        gone: list[Batch] = []

        def kill(moment: str) -> None:
            ids = frozenset(r.rollout_id for batch in gone for r in batch.rollouts)
            left[moment] = Killed(copy.deepcopy(store), ids)

        async with scheduler(name, store) as rollouts:
            loop = asyncio.get_running_loop()
            loop.call_later(0.31, kill, MOMENTS[0])
            for _ in range(2):
                batch = await asyncio.wait_for(rollouts.next_batch(), 600)
                if len(gone) == 1:
                    await asyncio.sleep(0.4)
                    kill(MOMENTS[2])
                await rollouts.update_weights(SimPublisher())
                gone.append(batch)
            loop.call_later(0.2, kill, MOMENTS[1])
            await asyncio.wait_for(rollouts.next_batch(), 600)

    run_virtual(live())
    return left


async def goes_on(name: str, started: Killed) -> None:
    store = copy.deepcopy(started.store)
    seen = set(started.acknowledged)
    async with scheduler(name, store) as rollouts:
        await rollouts.update_weights(SimPublisher(), version=rollouts.version + 1)
        for _ in range(4):
            batch = await asyncio.wait_for(rollouts.next_batch(), 600)
            check_invariants(rollouts.state)
            ids = {rollout.rollout_id for rollout in batch.rollouts}
            assert ids
            assert not ids & seen, "delivered twice"
            seen |= ids
            if "reward" in SETTINGS[name] and not batch.redelivered:
                assert all(rollout.reward is not None for rollout in batch.rollouts)
            await rollouts.update_weights(SimPublisher())
        check_invariants(rollouts.state)


PAIRS = (
    ("plain", "auto"),
    ("buckets", "plain"),
    ("buckets", "in place"),
    ("auto", "plain"),
    ("pool", "asynchronous tokens"),
    ("tail", "buckets tokens"),
    ("tail restart", "abort apart"),
    ("asynchronous", "evict"),
    ("asynchronous pool", "on policy"),
    ("large batch", "small batch"),
    ("reward of groups", "pairs"),
    ("accept rewarded", "samples"),
)
"""Settings of the first process whose state matters to the second. The interleavings of
tests/property cover the others."""
ONE_AT_A_TIME = (
    "plain", "buckets", "pool", "auto", "tail", "asynchronous pool", "asynchronous tokens",
    "accept rewarded",
)  # fmt: skip


@each_row(("first", "second"), PAIRS)
def test_a_run_resumes_under_other_settings(first: str, second: str) -> None:
    for moment, started in killed(first).items():
        try:
            run_virtual(goes_on(second, started))
        except TimeoutError:
            raise AssertionError(f"killed {moment}, it delivers nothing more") from None


@each_row("name", ONE_AT_A_TIME)
async def test_one_request_at_a_time_fills_batches(name: str) -> None:
    """Requests that `max_in_flight` holds back are sent when others end, so any batch fits."""
    async with scheduler(name, MemoryStore(), dispatch=Dispatch(max_in_flight=1)) as rollouts:
        for _ in range(3):
            batch = await asyncio.wait_for(rollouts.next_batch(), 6000)
            assert list(batch.rollouts)
            await rollouts.update_weights(SimPublisher())
        check_invariants(rollouts.state)


def test_an_episode_cannot_be_left_out() -> None:
    async def episode(turn: Any, prompt: Prompt) -> None:
        await turn.generate(prompt.input_ids)

    async def start(store: MemoryStore) -> None:
        config = SchedulerConfig(batch_groups=4, group_size=4)
        prompts = LongTailWorkload(median=60, cap=400, group_size=4, vocab_size=1000, seed=5)
        fleet = SimFleet(1)
        async with RolloutScheduler(fleet, prompts, config=config, store=store, episode=episode):
            pass

    with pytest.raises(ConfigError, match="episode function"):
        run_virtual(start(copy.deepcopy(killed("plain")[MOMENTS[1]].store)))
