"""Tests sleep and wake around a training step, on a real server.

The CPU server frees nothing, but it checks the order: it crashes if memory is released while a
request runs, or if memory is woken that was not released.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from aprilsched import Batch, DiskPublisher, RolloutScheduler, SchedulerConfig, SGLangFleet
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.testing.contract import greedy, until, whole
from aprilsched.types import Rollout
from tests.sglang.conftest import ADMIN_KEY
from tests.sglang.helpers import reset, settled
from tests.sglang.recorded import (
    Recorder,
    check_greedy,
    check_whole,
    long_tail,
    scheduled,
    try_until,
)
from tests.sglang.server import CpuServer

pytestmark = pytest.mark.long

STEPS = 5


@pytest.mark.shows("abort", "retract", "sleep", engine="SGLang")
@pytest.mark.parametrize("straggler", ["retract", "abort"])
async def test_stragglers_sleep_through_a_training_step_and_end_on_the_new_weights(
    clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path, straggler: StragglerRule
):
    async def once(_: int) -> list[Rollout]:
        await reset(clean_server.url, models[0])
        return await run_asleep(clean_server.url, models, straggler)

    def crossed(rollouts: list[Rollout]) -> bool:
        return sum(len(set(rollout.versions.tolist())) > 1 for rollout in rollouts) > 3

    delivered = await try_until(once, crossed, "too few rollouts are of several versions")
    check_greedy(delivered, models, tmp_path)
    await settled(clean_server.url)
    engine = SGLangEngine(clean_server.url)
    await engine.open()
    assert await engine.is_paused() is False
    await engine.close()


async def run_asleep(
    url: str, models: tuple[Path, Path], straggler: StragglerRule
) -> list[Rollout]:
    """The rollouts of a run whose engine sleeps in each training step, while weights are loaded."""
    recorder = Recorder()
    batches: list[Batch] = []
    async with scheduled([url], recorder, straggler=straggler) as rollouts:
        for step in range(STEPS):
            batches.append(await rollouts.next_batch())
            async with rollouts.asleep():
                released = {c.released for c in rollouts.state.fleet.control.engines.values()}
                assert released == {frozenset({"kv_cache", "weights"})}
                if straggler == "retract":
                    held = rollouts.state.in_flight.open_attempts
                    assert held == len(list(rollouts.state.in_flight.open_requests()))
                await rollouts.update_weights(DiskPublisher(models[(step + 1) % 2]))
        delivered = check_whole(rollouts, batches)
    for rollout in delivered:
        assert rollout.versions.tolist() == recorder.reported(rollout)
    return delivered


@pytest.mark.shows("sleep", engine="SGLang")
async def test_a_server_that_leaves_asleep_is_handed_back_when_the_trainer_wakes_the_others(
    clean_pair: tuple[CpuServer, CpuServer],
):
    leaving = clean_pair[0].url
    fleet = SGLangFleet(
        [server.url for server in clean_pair], stream_interval=16, admin_key=ADMIN_KEY
    )
    settings = SchedulerConfig(batch_groups=4, group_size=4, over_provision=2.0)
    scheduler = RolloutScheduler(fleet, long_tail(60, longest=400), config=settings)
    observer = SGLangEngine(leaving)
    await observer.open()
    async with scheduler as rollouts:
        await rollouts.next_batch()
        async with rollouts.asleep(tags=["kv_cache"]):
            await fleet.remove(leaving)
            await until(lambda: len(rollouts.state.fleet.control.engines) == 1)
            assert await observer.is_paused()

        async def goes_on() -> bool:
            return await observer.is_paused() is False

        await until(goes_on)
        assert len(await whole(observer, greedy(20))) == 20
        await settled(leaving)
        await rollouts.next_batch()
    await observer.close()
