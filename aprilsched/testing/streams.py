"""Requests and their streams, as a test of an engine reads them.

A test starts responses, waits until some tokens of them have arrived, does something to the engine,
and looks at what the streams gave. Nothing here depends on how fast the machine is: every wait is
for a condition, and its limit is for engines that hang.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from aprilsched.engines.base import Chunk, Engine, GenerationRequest
from aprilsched.types import Float32Array, Int32Array, SamplingParams

__all__ = ["ENDLESS", "PROMPT", "WAIT_SECONDS", "Stream", "greedy", "until", "whole"]

PROMPT = np.arange(3, 35, dtype=np.int32)
ENDLESS = 8000
"""Tokens of a response that is still running when a test looks at it. A test process that stood
still for a third of a second found a response of 200 tokens over."""
WAIT_SECONDS = 600.0
"""Longest wait for anything. Usually one or two seconds are enough; a busy machine needs more."""


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
