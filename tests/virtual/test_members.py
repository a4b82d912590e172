"""Tests lost members and the end of episodes with the real coordinator: user code that raises
MemberLost, cancels, blocks and gives back what it holds outside."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest

from aprilsched import (
    MemberLost,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SimFleet,
    SimPublisher,
    Turn,
)
from aprilsched.config import Retries, Staleness
from aprilsched.errors import EpisodeError
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.types import Rollout
from tests.support import small
from tests.support.checking import checked
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time


def prompts(count: int) -> list[Prompt]:
    return [Prompt(input_ids=np.array([i + 1, 2], dtype=np.int32)) for i in range(count)]


def config(rule: Any = "again", **changes: Any) -> SchedulerConfig:
    return small.config(
        **{"batch_groups": 2, "over_provision": 1.0, "retries": Retries(member=rule), **changes}
    )


def sampling(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)


def opened(settings: SchedulerConfig, count: int = 2, **functions: Any) -> RolloutScheduler:
    fleet = SimFleet(1, stream_interval=8)
    return checked(fleet, prompts(count), config=settings, **functions)


def dropped(rollouts: RolloutScheduler) -> dict[Reason, int]:
    return dict(rollouts.state.in_flight.ledger.rollouts)


class Sandboxes:
    """Counts the external resources of episodes, and how often each was released."""

    def __init__(self) -> None:
        self.made = 0
        self.ended: Counter[int] = Counter()

    def make(self, turn: Turn) -> None:
        self.made += 1
        number = self.made

        async def give_back() -> None:
            await asyncio.sleep(0.5)
            self.ended[number] += 1

        turn.on_end(give_back)

    def check(self) -> None:
        assert self.made
        assert self.ended == dict.fromkeys(range(1, self.made + 1), 1)


# --- lost members --------------------------------------------------------------------------------


@each_row(("rule", "size"), [("again", 4), ("shrink", 3)])
async def test_a_lost_sandbox_costs_no_sibling_of_its_episode(rule: str, size: int):
    sandboxes, started = Sandboxes(), Counter[int]()

    async def episode(turn: Turn, prompt: Prompt) -> float:
        sandboxes.make(turn)
        first = int(prompt.input_ids[0])
        started[first] += 1
        await turn.generate(prompt.input_ids, sampling(20))
        if turn.index == 1 and started[first] <= 4:
            raise MemberLost("sandbox gone")
        return 1.0

    async with opened(config(rule), episode=episode) as rollouts:
        batch = await rollouts.next_batch()
        assert [len(group.rollouts) for group in batch.groups] == [size, size]
        assert dropped(rollouts) == {Reason.MEMBER_LOST: 2}
        (entry, _) = rollouts.state.in_flight.ledger.entries
        assert entry.cause == "the episode raised MemberLost('sandbox gone')"
        assert entry.tokens == 20
        assert rollouts.state.in_flight.counters.regenerated == (2 if rule == "again" else 0)
    sandboxes.check()


async def test_episodes_of_lost_engines_restart_and_release_the_old():
    """A request runs out of attempts while its episode waits for it."""
    sandboxes = Sandboxes()

    async def episode(turn: Turn, prompt: Prompt) -> float:
        sandboxes.make(turn)
        await turn.generate(prompt.input_ids, sampling(100))
        return 1.0

    fleet = SimFleet(2, stream_interval=8)
    settings = config(retries=Retries(attempts=1, interruptions=1))
    async with RolloutScheduler(fleet, prompts(2), episode=episode, config=settings) as rollouts:
        waiting = asyncio.ensure_future(rollouts.next_batch())
        await asyncio.sleep(0.3)
        fleet.engines[0].crash()
        batch = await waiting
        assert [len(group.rollouts) for group in batch.groups] == [4, 4]
        assert set(dropped(rollouts)) == {Reason.MEMBER_LOST}
    sandboxes.check()


@each_row("rule", ["again", "shrink"])
async def test_a_lost_reward_is_retried_or_its_member_left_out(rule: str):
    asked = Counter[int]()

    def reward(rollout: Rollout, prompt: Prompt) -> float:
        asked[rollout.rollout_id] += 1
        if rollout.index == 2 and asked[rollout.rollout_id] == 1:
            raise MemberLost("the judge is gone")
        return 1.0

    async with opened(config(rule), reward=reward) as rollouts:
        batch = await rollouts.next_batch()
        sizes = [len(group.rollouts) for group in batch.groups]
        if rule == "again":
            assert sizes == [4, 4]
            assert sorted(asked.values()) == [1] * 6 + [2] * 2
            assert not dropped(rollouts)
        else:
            assert sizes == [3, 3]
            assert dropped(rollouts) == {Reason.MEMBER_LOST: 2}


async def test_a_function_that_judges_a_group_cannot_lose_one_member():
    calls = 0

    async def group_reward(group: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemberLost("which one?")
        return [1.0] * len(group.rollouts)

    settings = config(batch_groups=1)
    async with opened(settings, reward=group_reward, reward_scope="group") as rollouts:
        await rollouts.next_batch()
        assert dropped(rollouts) == {Reason.REWARD_FAILED: 4}


# --- the end of an episode -----------------------------------------------------------------------


async def _holds(sandboxes: Sandboxes, turn: Turn, prompt: Prompt, tokens: int) -> float:
    sandboxes.make(turn)
    await turn.generate(prompt.input_ids, sampling(tokens))
    return 1.0


@each_row("seconds", [0.0, 0.05, 0.5, 1.3])
async def test_a_close_in_any_phase_gives_everything_back_once(seconds: float):
    sandboxes = Sandboxes()

    async def episode(turn: Turn, prompt: Prompt) -> float:
        return await _holds(sandboxes, turn, prompt, 40 + 200 * turn.index)

    async with opened(config(), count=4, episode=episode) as rollouts:
        waiting = asyncio.ensure_future(rollouts.next_batch())
        await asyncio.sleep(seconds)
        waiting.cancel()
    if seconds:
        sandboxes.check()


@each_row(("rule", "reason"), [("evict", Reason.STALE), ("restart", Reason.BEGUN_AGAIN)])
async def test_stale_episodes_are_given_back_when_they_are_dropped(rule: str, reason: Reason):
    sandboxes = Sandboxes()

    async def episode(turn: Turn, prompt: Prompt) -> float:
        long = int(prompt.input_ids[0]) > 2
        return await _holds(sandboxes, turn, prompt, 4000 if long else 40)

    if rule == "evict":
        settings = config(
            over_provision=1.5, max_staleness=Staleness(1, "evict"), pace="asynchronous"
        )
    else:
        settings = config(max_staleness=Staleness(0, "restart"))
    async with opened(settings, count=3, episode=episode) as rollouts:
        await rollouts.next_batch()
        waiting = asyncio.ensure_future(rollouts.next_batch())
        await asyncio.sleep(1.0)
        before = sandboxes.made
        assert before == 12
        for _ in range(2):
            await rollouts.update_weights(SimPublisher())
        await asyncio.sleep(1.0)
        assert dropped(rollouts)[reason]
        assert sum(sandboxes.ended.values()) >= before
        waiting.cancel()
    sandboxes.check()


async def test_cleanups_run_in_reverse_and_failures_are_counted(
    caplog: pytest.LogCaptureFixture,
):
    order: list[str] = []

    async def episode(turn: Turn, prompt: Prompt) -> float:
        turn.on_end(lambda: order.append("first"))

        async def broken() -> None:
            order.append("second")
            raise asyncio.CancelledError

        def broken_too() -> None:
            order.append("third")
            raise SystemExit

        turn.on_end(broken)
        turn.on_end(broken_too)
        await turn.generate(prompt.input_ids, sampling(5))
        return 1.0

    settings = config(batch_groups=1, group_size=2)
    with caplog.at_level(logging.ERROR, "aprilsched"):
        async with opened(settings, count=1, episode=episode) as rollouts:
            await rollouts.next_batch()
            await asyncio.sleep(0.1)
            assert rollouts.state.in_flight.counters.teardowns_failed == 4
            assert not dropped(rollouts)
    assert Counter(order) == {"first": 2, "second": 2, "third": 2}
    assert order.index("third") < order.index("second") < order.index("first")
    text = [record for record in caplog.records if "teardown" in record.getMessage()]
    assert len(text) == 2, "one line for each kind"


async def test_a_cleanup_that_blocks_is_abandoned_after_its_limit():
    ended: list[int] = []

    async def episode(turn: Turn, prompt: Prompt) -> float:
        turn.on_end(lambda: ended.append(turn.index))
        turn.on_end(asyncio.Event().wait)
        await turn.generate(prompt.input_ids, sampling(5))
        return 1.0

    settings = config(batch_groups=1, group_size=2)
    loop = asyncio.get_running_loop()
    async with opened(settings, count=1, episode=episode) as rollouts:
        await rollouts.next_batch()
        started_at = loop.time()
    assert loop.time() - started_at < 45
    assert sorted(ended) == [0, 1]


async def test_an_episode_that_ignores_cancellation_is_released():
    sandboxes = Sandboxes()
    release = asyncio.Event()

    async def episode(turn: Turn, prompt: Prompt) -> float:
        sandboxes.make(turn)
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return 1.0

    async with opened(config(), episode=episode) as rollouts:
        waiting = asyncio.ensure_future(rollouts.next_batch())
        await asyncio.sleep(1)
        waiting.cancel()
    sandboxes.check()
    release.set()
    await asyncio.sleep(0)


async def test_nothing_can_be_registered_after_the_end():
    refused: list[str] = []

    async def episode(turn: Turn, prompt: Prompt) -> float:
        async def later() -> None:
            await asyncio.sleep(1)
            try:
                turn.on_end(later)
            except EpisodeError as error:
                refused.append(str(error))

        stray.append(asyncio.ensure_future(later()))
        await turn.generate(prompt.input_ids, sampling(5))
        return 1.0

    stray: list[asyncio.Future[None]] = []
    async with opened(config(batch_groups=1, group_size=1), count=1, episode=episode) as rollouts:
        await rollouts.next_batch()
        await asyncio.gather(*stray)
    assert "has ended" in refused[0]
