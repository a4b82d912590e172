"""What shows only in whole responses, read as the scheduler reads them: that routed rows join, and
what an engine made of new weights.

Checksums see parameters. What an engine made of them at its start (a fused, transposed, tied or
quantized copy) shows in nothing but what it generates.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.companions import Companion
from aprilsched.doctor.client import until
from aprilsched.engines.base import Chunk, GenerationRequest
from aprilsched.engines.server import despite_cancellation
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.engines.stream import version_number
from aprilsched.engines.vllm import VLLMEngine
from aprilsched.errors import EngineError
from aprilsched.types import Float32Array, Int32Array, SamplingParams

ServerEngine: TypeAlias = SGLangEngine | VLLMEngine

_SECONDS = 60.0
REFIT_SECONDS = 3600.0
"""Bound of three loads from a disk and of what is generated between them."""
_SHORT, _LONG, _BEGUN = 24, 1000, 8
"""Tokens of a response that shows the weights, of one that is aborted, and of its beginning."""


class Response:
    """One greedy response of ours, which a task reads; with a `companion`, its rows from the
    position `start` on."""

    def __init__(
        self,
        engine: ServerEngine,
        tokens: int,
        prompt: Int32Array | None = None,
        companion: Companion | None = None,
        start: int = 0,
    ) -> None:
        ids = np.arange(3, 11, dtype=np.int32) % (engine.facts.vocab_size or 11)
        self.request = GenerationRequest(
            request_id=uuid.uuid4().hex,
            input_ids=ids if prompt is None else prompt,
            sampling=SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True),
            # A prefix that another request has cached was computed in another order.
            cache_key=uuid.uuid4().hex,
            companions=() if companion is None else ((companion, start),),
        )
        self.chunks: list[Chunk] = []
        self.ids: list[int] = []
        self.begun = asyncio.Event()
        """Set with the first token, or at the end."""
        self.task = asyncio.create_task(self._read(engine))

    @property
    def context(self) -> Int32Array:
        """The ids of the prompt and of the response."""
        return np.concatenate((self.request.input_ids, np.array(self.ids, dtype=np.int32)))

    @property
    def logprobs(self) -> Float32Array:
        """The log-probability of each token."""
        return np.concatenate([chunk.logprobs for chunk in self.chunks])

    @property
    def rows(self) -> NDArray[Any]:
        """The companion's rows, which came with the end."""
        (rows,) = (self.chunks[-1].context_rows or {}).values()
        return rows.values

    async def _read(self, engine: ServerEngine) -> None:
        try:
            async with aclosing(engine.generate(self.request)) as chunks:
                async for chunk in chunks:
                    self.chunks.append(chunk)
                    self.ids += chunk.token_ids.tolist()
                    self.begun.set()
        finally:
            self.begun.set()

    async def has(self, tokens: int) -> None:
        """Wait until it has so many tokens, or has ended."""
        await until(lambda: len(self.ids) >= tokens or self.task.done(), _SECONDS)

    async def end(self) -> Response:
        """Wait for its end.

        Raises:
            EngineError: if the server breaks it off.
            TimeoutError: if it does not end.
        """
        async with asyncio.timeout(_SECONDS):
            await self.task
        return self

    async def leave(self) -> None:
        """End it, if it has not ended."""
        self.task.cancel()
        with suppress(asyncio.CancelledError, EngineError):
            await self.task


@dataclass(slots=True)
class RefitNotes:
    """Notes on a refit to other weights and back."""

    why_not: str | None = "it changes the weights; examine an idle server with --refit FOLDER"
    responses: list[Response] = field(default_factory=list[Response])
    """Fresh ones: before, after the server's own folder was loaded again, under the other weights,
    and after its own had come back."""
    rows: list[NDArray[Any]] = field(default_factory=list[NDArray[Any]])
    """Routed experts of the tokens before a retract in which the weights changed: those that came
    with the response, of one pass under the new weights, and of one under the old."""


async def seam(engine: ServerEngine, companion: Companion) -> list[NDArray[Any]]:
    """The rows of an aborted response, of its continuation, and of both in one pass.

    Raises:
        EngineError, TimeoutError: if a response breaks off or does not end.
    """
    first = Response(engine, _LONG, companion=companion)
    try:
        await first.has(_BEGUN)
        await engine.abort(first.request.request_id)
        await first.end()
    finally:
        await first.leave()
    known = first.context
    more = await Response(engine, _SHORT, known, companion, len(known) - 1).end()
    return [first.rows, more.rows, await _routed(engine, more.context[:-1], companion)]


async def prove(
    engine: ServerEngine, folder: str, noted: RefitNotes, companion: Companion | None = None
) -> None:
    """Load the server's own folder, `folder` with other weights of the model, and its own again,
    and note the responses between. Whatever happens, its own weights are loaded at the end, under
    the label that they had.

    With a `companion`, its routed experts, the other weights are loaded in a retract amid a
    response.

    Raises:
        EngineError, TimeoutError: if the server does not do what is asked.
    """
    if version_number(label := engine.facts.label):
        noted.why_not = f"its weights are those of version {label}, and of no folder"
        return
    noted.why_not = None
    own = Path(engine.facts.model_path)
    noted.responses.append(await Response(engine, _SHORT).end())
    try:
        await _load(engine, own, 0)
        noted.responses.append(await Response(engine, _SHORT).end())
        older = await _refit(engine, Path(folder), noted, companion)
    finally:
        await despite_cancellation(_take_back(engine, own))
    noted.responses.append(await Response(engine, _SHORT).end())
    if companion is not None:
        noted.rows.append(await _routed(engine, older, companion))


async def _refit(
    engine: ServerEngine, folder: Path, noted: RefitNotes, companion: Companion | None
) -> Int32Array:
    """Load the other weights, amid a response where there is a `companion`; returns the context
    that it had then."""
    amid = Response(engine, _LONG if companion else 1, companion=companion)
    try:
        await amid.has(_BEGUN if companion else 1)
        older = amid.context[:-1]
        await _load(engine, folder, 1)
        await amid.has(len(amid.ids) + 1)
        await engine.abort(amid.request.request_id)
        await amid.end()
    finally:
        await amid.leave()
    noted.responses.append(await Response(engine, _SHORT).end())
    if companion is not None:
        noted.rows += [amid.rows[: len(older)], await _routed(engine, older, companion)]
    return older


async def _take_back(engine: ServerEngine, own: Path) -> None:
    await _load(engine, own, 0)
    await engine.set_label(engine.facts.label)


async def _load(engine: ServerEngine, folder: Path, version: int) -> None:
    try:
        await engine.pause("retract")
        await engine.flush()
        await engine.update_from_disk(folder, version)
    finally:
        await engine.resume()


async def _routed(engine: ServerEngine, context: Int32Array, companion: Companion) -> NDArray[Any]:
    """The rows of a context in one pass under the weights of now."""
    return (await Response(engine, 1, context, companion).end()).rows
