"""Helpers for tests on servers: calls that the adapter does not make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from aprilsched import Batch, RolloutScheduler
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.weights.publisher import WeightPublisher
from aprilsched.testing.contract import Stream, until


@asynccontextmanager
async def opened(url: str) -> AsyncGenerator[SGLangEngine]:
    """An open engine on a server without keys."""
    engine = SGLangEngine(url, stream_interval=64)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


async def running(url: str) -> int:
    """Number of requests that the server runs or queues (an old value while it is paused)."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/v1/loads?include=core") as answer,
    ):
        (load,) = (await answer.json())["loads"]
        return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])


async def settled(url: str) -> None:
    """Wait until the server has no requests, because its figures lag by a step."""

    async def idle() -> bool:
        return await running(url) == 0

    await until(idle)


async def settled_but(url: str, other: Stream) -> None:
    """Wait until the server has no request but `other`, which started before those that should end
    early and has their length, and end it too."""

    async def one_at_most() -> bool:
        return await running(url) <= 1

    await until(one_at_most)
    assert not other.done, "a request that was left or aborted continued to its end"
    await other.cut()
    await settled(url)


async def reset(url: str, weights: Path, key: str | None = None) -> None:
    """Bring a server to its initial state: idle, not paused, an empty cache, label "default"."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(url, headers=headers) as session:

        async def post(path: str, **body: Any) -> int:
            async with session.post(path, json=body) as answer:
                await answer.read()
                return answer.status

        async def flushed() -> bool:
            return await post("/flush_cache") == 200

        await post("/continue_generation")
        await post("/abort_request", abort_all=True)
        await until(flushed)
        async with session.get("/model_info") as answer:
            if (await answer.json())["weight_version"] == "default":
                return
        update = {"model_path": str(weights), "weight_version": "default", "flush_cache": False}
        await post("/pause_generation", mode="retract")
        assert await post("/update_weights_from_disk", **update) == 200
        await post("/continue_generation")
        await until(flushed)


async def batch_through_updates(rollouts: RolloutScheduler, publisher: WeightPublisher) -> Batch:
    """Return the next batch, of which nothing is lost. Weights are loaded three times while it is
    generated, each time after some hundred tokens, unless it ends before."""
    waiting = asyncio.ensure_future(rollouts.next_batch())
    counters = rollouts.state.in_flight.counters
    for _ in range(3):
        before = counters.tokens_generated
        await until(
            lambda before=before: waiting.done() or counters.tokens_generated > before + 400
        )
        await rollouts.update_weights(publisher)
    batch = await waiting
    assert rollouts.state.in_flight.ledger.total == 0
    return batch
