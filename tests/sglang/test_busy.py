"""Tests a real server whose queue is bounded: what it has no room for waits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aprilsched import Prompt, RolloutScheduler, SamplingParams, SchedulerConfig, SGLangFleet
from tests.sglang.server import CpuServer


@pytest.fixture(scope="module")
def narrow_server(
    models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CpuServer]:
    """A server that lets four requests wait, and runs four."""
    log = tmp_path_factory.mktemp("narrow") / "log.txt"
    bounds = ("--max-queued-requests", "4", "--max-running-requests", "4")
    with CpuServer(models[0], log, *bounds) as server:
        server.wait_ready()
        yield server


@pytest.mark.parametrize("shares", [True, False], ids=["one body", "a body each"])
async def test_all_rollouts_of_a_busy_server_come(
    narrow_server: CpuServer, caplog: pytest.LogCaptureFixture, shares: bool
) -> None:
    """16 groups of 4, of which it takes 8 responses at a time."""
    config = SchedulerConfig(
        batch_groups=16,
        group_size=4,
        over_provision=1.0,
        sampling=SamplingParams(
            max_new_tokens=24, ignore_eos=True, request={} if shares else {"priority": 0}
        ),
    )
    prompts = [Prompt(input_ids=np.array([i + 3, 5, 7], np.int32)) for i in range(16)]
    fleet = SGLangFleet([narrow_server.url], stream_interval=8)
    async with RolloutScheduler(fleet, prompts, config=config) as rollouts:
        with caplog.at_level(logging.WARNING, "aprilsched"):
            batch = await rollouts.next_batch()
        assert sum(len(group.rollouts) for group in batch.groups) == 64
        assert {len(rollout) for group in batch.groups for rollout in group.rollouts} == {24}
        assert list(rollouts.state.fleet.control.engines) == [fleet.engines[0].name]
        assert not rollouts.state.in_flight.ledger.total
    (text,) = [each.getMessage() for each in caplog.records if "has no room" in each.getMessage()]
    assert "The request queue is full" in text
    assert "--max-queued-requests" in text
