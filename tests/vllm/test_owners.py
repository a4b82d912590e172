"""Tests two owners of one real vLLM server, which shows a live owner only while it is paused."""

from __future__ import annotations

import asyncio

import aiohttp

from aprilsched import VLLMFleet
from aprilsched.agents.gateway import Gateway, GatewaySettings
from aprilsched.kernel.engines.vllm import VLLMEngine
from tests.vllm.server import VLLMServer

LONG = {"input_ids": [3, 5, 7], "sampling_params": {"max_new_tokens": 7000, "ignore_eos": True}}


async def test_a_paused_server_is_claimed_once_its_owner_is_gone(clean_server: VLLMServer):
    settings = GatewaySettings(port=0, drain_s=0)
    second = VLLMEngine(clean_server.url)
    await second.open()
    try:
        async with (
            Gateway(VLLMFleet([clean_server.url]), settings=settings) as gateway,
            aiohttp.ClientSession(gateway.url) as session,
            session.post("/generate", json={**LONG, "stream": True}) as answer,
        ):
            await answer.content.readline()
            async with session.post("/pause_generation", json={"mode": "retract"}) as paused:
                assert paused.status == 200
            assert await second.is_paused()
            assert not await second.claim()
            assert await second.is_paused()
        await second.pause("retract")  # as a killed process leaves the server
        assert await second.claim()
    finally:
        await second.resume()
        await second.close()


async def test_the_owner_of_a_paused_server_may_stall_for_seconds(clean_server: VLLMServer):
    first, second = VLLMEngine(clean_server.url), VLLMEngine(clean_server.url)
    await first.open()
    await second.open()
    try:
        assert await first.claim()
        await first.pause("retract")
        claiming = asyncio.create_task(second.claim())
        await asyncio.sleep(4.0)  # The owner's process stands still.
        assert await first.is_paused()
        assert not await claiming
    finally:
        await first.resume()
        await first.close()
        await second.close()
