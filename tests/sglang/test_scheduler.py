"""Tests pause, refit and continue on a real server, with every token accounted for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aprilsched import DiskPublisher, RolloutScheduler, SchedulerConfig, SGLangFleet
from aprilsched.kernel.core.policies.straggler import StragglerRule
from aprilsched.testing.contract import until
from tests.sglang.held import Site, run_and_check
from tests.sglang.helpers import opened, reset, settled
from tests.sglang.recorded import BATCHES, long_tail
from tests.sglang.server import CpuServer

LONGEST = 7000


def kinds(*names: str) -> list[Any]:
    """The names as parameters; all but the usual rule are long."""
    return [pytest.param(name, marks=[pytest.mark.long] * (name != "retract")) for name in names]


@pytest.mark.shows(
    "abort", "retract", "in_place", "single samples", "weights from disk", engine="SGLang"
)
@pytest.mark.parametrize("kind", kinds("retract", "samples", "in_place", "abort", "buckets"))
async def test_every_token_is_of_the_version_that_it_was_given(
    clean_server: CpuServer, models: tuple[Path, Path], tmp_path: Path, kind: str
):
    """There is a run for each rule, with long tails, and a refit from a folder with very different
    weights after each batch."""

    async def clean(url: str) -> None:
        await settled(url)
        await reset(url, models[0])

    site = Site([clean_server.url], models, tmp_path, clean)
    await run_and_check(site, kind, batches=BATCHES, versions=3, prompts=long_tail(200))


@pytest.mark.parametrize("rule", kinds("retract", "in_place", "abort", "run"))
async def test_a_cancelled_trainer_leaves_the_server_running_and_idle(
    clean_server: CpuServer, models: tuple[Path, Path], rule: StragglerRule
):
    """The trainer is cancelled as by Ctrl-C, in the middle of generation and of an update."""
    scheduler = RolloutScheduler(
        SGLangFleet([clean_server.url]),
        long_tail(40, longest=LONGEST),
        config=SchedulerConfig(
            batch_groups=4, group_size=4, over_provision=2.0, straggler=rule, pace="asynchronous"
        ),
    )

    async def train() -> None:
        async with scheduler as rollouts:
            async for _ in rollouts:
                await rollouts.update_weights(DiskPublisher(models[0]))

    task = asyncio.create_task(train())
    await until(lambda: scheduler.state.weights.update is not None)
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    rollouts = scheduler.state.in_flight.rollouts.values()
    # They have not continued to their end.
    assert all(each.log.size < LONGEST for each in rollouts)
    assert LONGEST in {each.sampling.max_new_tokens for each in rollouts}
    async with opened(clean_server.url) as engine:
        assert await engine.is_paused() is False
    await settled(clean_server.url)
