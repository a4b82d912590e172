"""Tests the real coordinator on the embedded engine, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from aprilsched import (
    Batch,
    Group,
    Prompt,
    Rollout,
    RolloutScheduler,
    SamplingParams,
    SimFleet,
    SimPublisher,
)
from aprilsched.config import Dispatch
from aprilsched.errors import RunGivenUp, SchedulerClosed
from aprilsched.kernel.core.messages.events import Event, Finished
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.simulation.engine import run_virtual
from tests.support.checking import Checking, checked
from tests.support.small import config, workload
from tests.support.table import each_row

pytestmark = pytest.mark.virtual_time

ONE = SamplingParams(max_new_tokens=1, ignore_eos=True)
STRAGGLERS = ["retract", "in_place", "abort", "run"]


def check(batches: Sequence[Batch], scheduler: RolloutScheduler) -> None:
    """Check conservation, whole groups, equal lengths of all fields, and exact versions."""
    ids = [rollout.rollout_id for batch in batches for rollout in batch.rollouts]
    assert len(ids) == len(set(ids))
    in_flight = scheduler.state.in_flight
    assert (
        in_flight.counters.launched == len(ids) + len(in_flight.rollouts) + in_flight.ledger.total
    )
    for batch in batches:
        for group in batch.groups:
            assert [r.index for r in group.rollouts] == list(range(len(group.rollouts)))
        for rollout in batch.rollouts:
            n = len(rollout.token_ids)
            assert n == len(rollout.logprobs) == len(rollout.versions) == len(rollout.loss_mask)
            assert rollout.versions_exact
            assert [s.start for s in rollout.segments] == [
                0,
                *(s.end for s in rollout.segments[:-1]),
            ]


@each_row(
    ("straggler", "pace", "refill"),
    [
        *((straggler, "synchronous", "wave") for straggler in STRAGGLERS),
        *((straggler, "asynchronous", "pool") for straggler in STRAGGLERS),
    ],
)
async def test_every_rule_delivers_whole_groups_with_exact_versions(
    straggler: str, pace: str, refill: str
):
    settings = config(straggler=straggler, pace=pace, refill=refill)
    scheduler = checked(SimFleet(2, stream_interval=16), workload(), config=settings)
    batches: list[Batch] = []
    async with scheduler as rollouts:
        for _ in range(6):
            batches.append(await rollouts.next_batch())
            await rollouts.update_weights(SimPublisher())
        check(batches, scheduler)
    assert [batch.version for batch in batches] == list(range(6))
    spans = {len(set(r.versions.tolist())) for b in batches for r in b.rollouts}
    assert max(spans) == 1 if straggler == "run" else max(spans) > 1


@each_row("straggler", ["retract", "in_place", "abort"])
def test_greedy_tokens_survive_interruptions_unchanged(straggler: str):
    prompts = [
        Prompt(
            input_ids=np.array([i + 1, 5, 9], dtype=np.int32),
            sampling=SamplingParams(max_new_tokens=40 + 60 * i, temperature=0, ignore_eos=True),
        )
        for i in range(8)
    ]

    async def tokens(rule: str, ratio: float) -> dict[int, list[int]]:
        same = SimPublisher(lambda _: 0)
        out: dict[int, list[int]] = {}
        async with RolloutScheduler(
            SimFleet(2, stream_interval=8),
            prompts,
            config=config(batch_groups=2, group_size=1, over_provision=ratio, straggler=rule),
        ) as rollouts:
            await rollouts.update_weights(same)
            async for batch in rollouts:
                for rollout in batch.rollouts:
                    out[int(rollout.prompt_ids[0])] = rollout.token_ids.tolist()
                await rollouts.update_weights(same)
        return out

    assert run_virtual(tokens(straggler, 3.0)) == run_virtual(tokens("run", 1.0))


async def test_plain_functions_group_rewards_and_accept():
    """Plain functions run in threads, so this one runs in (scaled) wall time."""

    def score(group: Group) -> list[float]:
        return [float(i) for i in range(len(group.rollouts))]

    def liked(prompt: Prompt) -> bool:
        return int(prompt.input_ids.sum()) % 3 != 0

    async with RolloutScheduler(
        SimFleet(1, time_scale=0.01),
        workload(),
        reward=score,
        reward_scope="group",
        accept=lambda group: liked(group.prompt),
        config=config(),
    ) as rollouts:
        for _ in range(4):
            batch = await rollouts.next_batch()
            assert all(liked(group.prompt) for group in batch.groups)
            assert [r.reward for r in batch.groups[0].rollouts] == [0.0, 1.0, 2.0, 3.0]
        assert rollouts.state.in_flight.ledger.rollouts[Reason.REJECTED] > 0


async def test_the_reward_of_a_dropped_rollout_is_cancelled():
    cancelled: list[int] = []

    async def score(rollout: Rollout, prompt: Prompt) -> float:
        if rollout.index == 0:
            await asyncio.sleep(1e5)
            raise ValueError("first")
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            cancelled.append(rollout.rollout_id)
            raise
        return 0.0

    async with RolloutScheduler(
        SimFleet(1), workload(count=1), reward=score, config=config()
    ) as rollouts:
        with pytest.raises(RunGivenUp, match=r"no group was delivered: 1 of 1 failed.*first"):
            await rollouts.next_batch()
        assert rollouts.state.in_flight.ledger.total == 4
    assert cancelled, "siblings that were scoring when the first one failed"


async def test_a_cancelled_update_completes_and_engines_continue():
    async with RolloutScheduler(
        SimFleet(1, refit_seconds=5.0), workload(), config=config(pace="asynchronous")
    ) as rollouts:
        await rollouts.next_batch()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await rollouts.update_weights(SimPublisher())
        await rollouts.next_batch()
        report = await rollouts.update_weights(SimPublisher())
        assert report.version == 2
        await rollouts.next_batch()


class LastingFleet(SimFleet):
    """Engines that outlive the scheduler, as servers do."""

    async def close(self) -> None: ...


@pytest.mark.parametrize("straggler", STRAGGLERS)
@pytest.mark.parametrize("moments", [4, pytest.param(13, marks=pytest.mark.long)])
async def test_closing_in_any_state_leaves_engines_idle_and_unpaused(straggler: str, moments: int):
    clock = asyncio.get_running_loop().time

    async def train(scheduler: RolloutScheduler) -> None:
        async with scheduler as rollouts:
            async for _ in rollouts:
                await rollouts.update_weights(SimPublisher())

    settings = config(straggler=straggler, pace="asynchronous")
    for seconds in np.linspace(0.0, 9.0, moments):
        fleet = LastingFleet(2, refit_seconds=0.3)
        task = asyncio.create_task(train(RolloutScheduler(fleet, workload(), config=settings)))
        await asyncio.sleep(float(seconds))
        started = clock()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert clock() - started <= 1.0
        await asyncio.sleep(0.1)
        for engine in fleet.engines:
            assert engine.batcher.paused is None
            assert engine.batcher.running + engine.batcher.waiting == 0
            await engine.close()
        assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


async def test_used_outside_of_its_block():
    scheduler = RolloutScheduler(SimFleet(1), workload(), config=config())
    with pytest.raises(SchedulerClosed):
        await scheduler.next_batch()
    async with scheduler:
        pass
    with pytest.raises(SchedulerClosed):
        await scheduler.next_batch()
    with pytest.raises(SchedulerClosed):
        async with scheduler:
            pass


def test_sends_are_paced():
    class Sends(Checking):
        def __init__(self) -> None:
            super().__init__()
            self.first_tokens: list[float] = []

        def on_event(self, event: Event, now: float) -> None:
            if isinstance(event, Finished):
                self.first_tokens.append(now)

    async def main(rate: int) -> float:
        listener = Sends()
        prompts = [
            Prompt(input_ids=np.array([i + 1], dtype=np.int32), sampling=ONE) for i in range(40)
        ]
        async with RolloutScheduler(
            SimFleet(1),
            prompts,
            config=config(
                batch_groups=40, group_size=1, over_provision=1.0, dispatch=Dispatch(rate=rate)
            ),
            listeners=[listener],
        ) as rollouts:
            await rollouts.next_batch()
        return listener.first_tokens[-1] - listener.first_tokens[0]

    assert run_virtual(main(10)) >= 3.0
    assert run_virtual(main(2000)) < 0.1
