"""Tests two owners of one real server: a claim keeps the second one away, and an owner whose pause
another client ends stops before weights are loaded under that client's requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from aprilsched import (
    DiskPublisher,
    Prompt,
    RolloutScheduler,
    SamplingParams,
    SchedulerConfig,
    SGLangFleet,
)
from aprilsched.agents.gateway import Gateway, GatewaySettings
from aprilsched.errors import EngineTaken
from aprilsched.kernel.engines.base import Engine
from aprilsched.testing.contract import until
from tests.sglang.conftest import INTERVAL
from tests.sglang.helpers import opened
from tests.sglang.server import CpuServer

CLAIM_S = 60.0
"""Seconds within which a claim that is not renewed has expired, also on a busy machine."""
LONG = {"input_ids": [3, 5, 7], "sampling_params": {"max_new_tokens": 7000, "ignore_eos": True}}


@asynccontextmanager
async def paused_gateway(url: str) -> AsyncGenerator[Gateway]:
    """A gateway whose client has paused it with a request in the server."""
    fleet = SGLangFleet([url], stream_interval=INTERVAL)
    async with (
        Gateway(fleet, settings=GatewaySettings(port=0, drain_s=0)) as gateway,
        aiohttp.ClientSession(gateway.url) as session,
        session.post("/generate", json={**LONG, "stream": True}) as answer,
    ):
        await answer.content.readline()
        async with session.post("/pause_generation", json={"mode": "retract"}) as paused:
            assert paused.status == 200
        yield gateway


@asynccontextmanager
async def gateway_process(url: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """`aprilsched gateway` in another process."""
    command = [sys.executable, "-m", "aprilsched", "gateway", "--engine", url, "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def scheduler(url: str) -> RolloutScheduler:
    """A scheduler with responses that are in the server for long."""
    sampling = SamplingParams(max_new_tokens=4096, ignore_eos=True)
    prompts = (Prompt(input_ids=np.array([3, 5, i % 500], dtype=np.int32)) for i in range(1000))
    config = SchedulerConfig(batch_groups=2, group_size=2, over_provision=2.0, sampling=sampling)
    return RolloutScheduler(SGLangFleet([url], stream_interval=INTERVAL), prompts, config=config)


async def is_paused(url: str) -> bool | None:
    async with opened(url) as engine:
        return await engine.is_paused()


async def test_a_second_gateway_leaves_a_paused_server_paused(clean_server: CpuServer):
    url = clean_server.url
    async with paused_gateway(url), gateway_process(url) as second:
        _, text = await second.communicate()
        assert second.returncode == 2
        assert b"is owned by another scheduler or gateway" in text
        assert await is_paused(url)
    # The first has given its claim back.
    async with gateway_process(url) as third:
        assert third.stdout is not None
        assert b"listens at" in await third.stdout.readline()


async def test_the_pause_of_a_killed_owner_is_ended(
    clean_server: CpuServer, caplog: pytest.LogCaptureFixture
):
    url = clean_server.url
    async with gateway_process(url) as first:
        assert first.stdout is not None
        await first.stdout.readline()
        first.kill()
        await first.wait()
    async with opened(url) as engine:
        await engine.pause("retract")
    async with Gateway(SGLangFleet([url]), settings=GatewaySettings(port=0)) as gateway:
        assert any("was left paused" in message for message in caplog.messages)
        assert not await is_paused(url)
        async with aiohttp.ClientSession(gateway.url) as session:
            body = {"input_ids": [3, 5], "sampling_params": {"max_new_tokens": 4}}
            async with session.post("/generate", json=body) as answer:
                assert answer.status == 200


async def test_a_gateway_whose_pause_is_ended_by_another_client_stops(clean_server: CpuServer):
    async with paused_gateway(clean_server.url) as gateway:
        async with opened(clean_server.url) as other:
            await other.resume()
        error = await gateway.wait_failed()
        assert isinstance(error, EngineTaken)
        assert "runs although this scheduler has paused it" in str(error)


class _Noted(DiskPublisher):
    """Notes whether it is asked to load weights."""

    published = False

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        self.published = True
        return await super().publish(version, engines)


async def test_no_weights_are_loaded_into_a_server_that_another_client_has_continued(
    clean_server: CpuServer, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    publisher = _Noted(models[1])
    async with scheduler(clean_server.url) as rollouts:
        waiting = asyncio.create_task(rollouts.next_batch())
        (engine,) = rollouts._session.engines.values()
        flush = engine.flush

        async def flushed() -> None:
            await flush()
            async with opened(clean_server.url) as other:
                await other.resume()

        monkeypatch.setattr(engine, "flush", flushed)
        await until(lambda: rollouts.state.in_flight.open_attempts > 0)
        with pytest.raises(EngineTaken, match="another client owns it too"):
            await rollouts.update_weights(publisher)
        with pytest.raises(EngineTaken):
            await waiting
    assert not publisher.published
    async with opened(clean_server.url) as engine:
        assert await engine.version() == 0


async def test_an_owner_finds_that_it_has_lost_its_claim(clean_server: CpuServer):
    url = clean_server.url
    async with opened(url) as first, opened(url) as second:

        async def is_lost() -> bool:
            return not await first.claim()

        assert await first.claim()
        assert not await second.claim()
        # The first does not renew its claim, as if its process stood still.
        await until(second.claim, CLAIM_S)
        await until(is_lost, CLAIM_S)
        await first.disclaim()
        assert await second.claim()
        await second.disclaim()
        assert await first.claim()
        await first.disclaim()
