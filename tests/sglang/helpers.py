"""Helpers for tests on servers: requests, streams, and calls that the adapter does not make."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from aprilsched.engines.base import Chunk, Engine, GenerationRequest
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.types import Float32Array, Int32Array, SamplingParams

__all__ = [
    "ENDLESS",
    "PROMPT",
    "SOON",
    "WAIT_SECONDS",
    "Stream",
    "greedy",
    "opened",
    "reset",
    "running",
    "settled",
    "until",
    "whole",
]

PROMPT = np.arange(3, 35, dtype=np.int32)
ENDLESS = 8000
"""Tokens of a response that is still running when a test looks at it. A test process that stood
still for a third of a second found a response of 200 tokens over."""
WAIT_SECONDS = 600.0
"""Longest wait for anything. Usually one or two seconds are enough; a busy machine needs more."""
SOON = 15.0
"""Seconds within which an aborted request ends. A request that continues to its thousands of tokens
takes longer; a busy machine slows both."""


def greedy(
    tokens: int = 64, *, prompt: Int32Array = PROMPT, request_id: str | None = None
) -> GenerationRequest:
    """A request for exactly `tokens` greedy tokens, under an id of the usual length."""
    return GenerationRequest(
        request_id=request_id or uuid.uuid4().hex,
        input_ids=prompt,
        sampling=SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True),
    )


@dataclass
class Stream:
    """A request whose stream a task reads, and its chunks so far."""

    engine: Engine
    request: GenerationRequest
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    task: asyncio.Task[None] | None = None

    def start(self) -> Stream:
        """Read it in a task of its own."""
        self.task = asyncio.create_task(self._read())
        return self

    async def end(self) -> Stream:
        """Wait for its last chunk."""
        assert self.task is not None
        await asyncio.wait_for(self.task, WAIT_SECONDS)
        return self

    async def reach(self, tokens: int) -> Stream:
        """Wait until `tokens` tokens have arrived of a response that is to go on after them."""
        await until(lambda: len(self) >= tokens or self.done)
        assert not self.done, "the response was over too soon; ask for more tokens"
        return self

    async def cut(self, tokens: int = 0) -> Stream:
        """Wait until `tokens` tokens have arrived, and abort it until it ends, as a scheduler does.

        A single abort may be lost while the engine is paused.
        """
        await until(lambda: len(self) >= tokens or self.done)
        async with asyncio.timeout(WAIT_SECONDS):
            while not self.done:
                await self.engine.abort(self.request.request_id)
                await asyncio.sleep(0.05)
        return await self.end()

    @property
    def done(self) -> bool:
        return self.task is not None and self.task.done()

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]

    @property
    def ids(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in chunk.token_ids]

    @property
    def logprobs(self) -> Float32Array:
        return np.concatenate([chunk.logprobs for chunk in self.chunks])

    def __len__(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    async def _read(self) -> None:
        async with aclosing(self.engine.generate(self.request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                self.chunks.append(chunk)


@asynccontextmanager
async def opened(url: str) -> AsyncGenerator[SGLangEngine]:
    """An open engine on a server without keys."""
    engine = SGLangEngine(url, stream_interval=64)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


async def whole(engine: Engine, request: GenerationRequest) -> Stream:
    """The response to `request`, read to its end."""
    return await Stream(engine, request).start().end()


async def until(
    condition: Callable[[], bool] | Callable[[], Awaitable[bool]], seconds: float = WAIT_SECONDS
) -> None:
    """Wait for `condition`."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.01)


async def running(url: str) -> int:
    """Number of requests that the server runs or queues (an old value while it is paused)."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/v1/loads?include=core") as answer,
    ):
        (load,) = (await answer.json())["loads"]
        return int(load["num_running_reqs"]) + int(load["num_waiting_reqs"])


async def settled(url: str) -> None:
    """Wait briefly until the server has no requests, because its figures lag by a step."""

    async def idle() -> bool:
        return await running(url) == 0

    await until(idle, SOON)


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
