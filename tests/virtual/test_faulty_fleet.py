"""Tests which faults of servers a run survives, with the real scheduler and the real adapters.

Each test repeats what the campaign of seeds (tests/campaign) once found. The sockets are real and
the clock is virtual.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest

from aprilsched import LongTailWorkload, RolloutScheduler, SchedulerConfig, SGLangFleet
from aprilsched.kernel.engines.http import HttpLimits
from aprilsched.simulation.engine import run_virtual
from aprilsched.testing.contract import until
from tests.support import small
from tests.support.faults import (
    ABORT,
    Answer,
    Corrupt,
    Cut,
    Delay,
    Fault,
    FaultyServer,
    Garbage,
    no_logprobs,
)
from tests.support.sim_http import CONFIG, INTERVAL

pytestmark = pytest.mark.virtual_time

LIMITS = HttpLimits(max_answer_bytes=2**20)
BATCHES = 6
OPENED = 1.0
"""Time in seconds by which the servers are open."""


config = partial(small.config, group_size=2, over_provision=1.5)


@asynccontextmanager
async def fleet_with(
    fault: Fault,
    *,
    faulty: int = 1,
    engines: int = 3,
    settings: SchedulerConfig | None = None,
) -> AsyncGenerator[tuple[RolloutScheduler, list[FaultyServer]]]:
    """A scheduler on `engines` servers, the first `faulty` of which have the fault."""
    faults = [replace(fault, at=OPENED)]
    prompts = LongTailWorkload(median=80, sigma=0.5, cap=400, group_size=2, vocab_size=512, seed=3)
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(
                FaultyServer(CONFIG, faults=faults if index < faulty else [], seed=(0, index))
            )
            for index in range(engines)
        ]
        fleet = SGLangFleet(
            [server.url for server in servers],
            stream_interval=INTERVAL,
            limits=LIMITS,
        )
        rollouts = await stack.enter_async_context(
            RolloutScheduler(fleet, prompts, config=settings or config())
        )
        await asyncio.sleep(OPENED)
        yield rollouts, servers


def test_failing_aborts_at_the_end_leave_no_engine_paused():
    async def main(fault: Fault) -> None:
        loop = asyncio.get_running_loop()
        settings = config(pace="synchronous", over_provision=3.0)
        fault = replace(fault, routes=ABORT)
        async with fleet_with(fault, engines=1, settings=settings) as (rollouts, servers):
            await rollouts.next_batch()
            batcher = servers[0].engine.batcher
            await until(lambda: batcher.paused is not None)
            closing = loop.time()
            await rollouts.close()
            assert loop.time() - closing <= 1.0 + LIMITS.abort_timeout
            assert batcher.paused is None

    run_virtual(main(Garbage(what="endless", size=2**22)))
    run_virtual(main(Answer(status=500)))
    run_virtual(main(Delay()))


async def delivered(rollouts: RolloutScheduler, *, at_most: int = 0) -> None:
    """Check that several batches are delivered and almost no group is dropped."""
    for _ in range(BATCHES):
        batch = await rollouts.next_batch()
        assert len(batch.groups) == 4
    assert rollouts.state.in_flight.ledger.total <= 2 * at_most


@pytest.mark.parametrize("fault", [Answer(status=401), Answer(status=400, after_tokens=0)])
async def test_an_engine_that_refuses_everything_costs_no_rollout(fault: Fault):
    async with fleet_with(fault) as (rollouts, servers):
        await delivered(rollouts)
        refusing = servers[0].url.removeprefix("http://")
        assert refusing not in rollouts.state.fleet.control.engines


@pytest.mark.parametrize(
    "fault",
    [
        Corrupt(change=no_logprobs),
        Cut(),
        Cut(clean=True, after_tokens=0),
        Garbage(after_tokens=0),
        Garbage(what="endless", size=2**24, after_tokens=0),
    ],
)
async def test_two_faulty_engines_of_three_cost_no_rollout(fault: Fault):
    async with fleet_with(fault, faulty=2) as (rollouts, servers):
        await delivered(rollouts)
        assert all(server.faults.fired[fault.kind] for server in servers[:2])


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_a_fleet_that_lost_its_key_or_its_path_is_waited_for(status: int):
    async with fleet_with(Answer(status=status, until=60), faulty=3) as (rollouts, _):
        await delivered(rollouts, at_most=8)
        assert asyncio.get_running_loop().time() > 60


async def test_a_request_no_engine_accepts_is_dropped_alone():
    fault = Answer(status=400, probability=0.2, after_tokens=0)
    async with fleet_with(fault, faulty=3) as (rollouts, _):
        for _ in range(BATCHES):
            await rollouts.next_batch()
        assert len(rollouts.state.fleet.control.engines) == 3
