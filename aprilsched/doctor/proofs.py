"""What shows only in whole responses, read as the scheduler reads them: that routed rows join, and
what an engine made of new weights.

Checksums see parameters. What an engine made of them at its start (a fused, transposed, tied or
quantized copy) shows in nothing but what it generates.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.companions import Companion
from aprilsched.doctor.findings import LeftOut, Verdict, failed, passed, warned
from aprilsched.engines.base import Capabilities, GenerationRequest
from aprilsched.engines.server import despite_cancellation
from aprilsched.engines.sglang import SGLangEngine
from aprilsched.engines.stream import version_number
from aprilsched.engines.vllm import VLLMEngine
from aprilsched.errors import EngineError
from aprilsched.testing.contract import Stream, until
from aprilsched.types import Int32Array, SamplingParams

ServerEngine: TypeAlias = SGLangEngine | VLLMEngine

REFIT_SECONDS = 3600.0
"""Bound of three loads from a disk and of what is generated between them."""
_SHORT, _LONG, _BEGUN = 24, 1000, 8
"""Tokens of a response that shows the weights, of one that is aborted, and of its beginning."""
_DIFFERENCE = 1e-3
"""Log-probabilities under the same weights differ by less: nothing else is on the server, and no
prefix is cached."""
NOT_ASKED = warned("not tried: it changes the weights; examine an idle server with --refit FOLDER")
"""What is said of a refit that nobody has asked for, or that would change weights of others."""

TIER_ACTION = (
    "sends a key of the engine's weights with each request there, and lets no response wait inside "
    "while KV is recomputed"
)


def kv_tier(able: Capabilities) -> Verdict:
    """Whether KV may survive a flush of a server that can do what `able` has."""
    if able.kv_tier == "none":
        return passed("no KV survives a flush")
    if able.kv_tier == "keyed":
        return warned("KV may survive a flush, and only requests with its cache key find it")
    return failed(
        "KV survives a flush, and requests find it under any cache key",
        'start it without a storage for KV, or use kv_after_refit="keep"',
    )


@asynccontextmanager
async def reading(
    engine: ServerEngine,
    tokens: int,
    prompt: Int32Array | None = None,
    companion: Companion | None = None,
    start: int = 0,
) -> AsyncGenerator[Stream]:
    """One greedy response of ours, which ends with the block at the latest; with a `companion`, its
    rows from the position `start` on."""
    ids = np.arange(3, 11, dtype=np.int32) % (engine.facts.vocab_size or 11)
    request = GenerationRequest(
        request_id=uuid.uuid4().hex,
        input_ids=ids if prompt is None else prompt,
        sampling=SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True),
        # A prefix that another request has cached was computed in another order.
        cache_key=uuid.uuid4().hex,
        companions=() if companion is None else ((companion, start),),
    )
    stream = Stream(engine, request).start()
    try:
        yield stream
    finally:
        if stream.task is not None:
            stream.task.cancel()
            with suppress(asyncio.CancelledError, EngineError):
                await stream.task


async def whole(engine: ServerEngine, tokens: int = _SHORT, *request: Any) -> Stream:
    """The same, read to its end.

    Raises:
        EngineError: if the server breaks it off.
    """
    async with reading(engine, tokens, *request) as stream:
        return await stream.end()


def _context(stream: Stream) -> Int32Array:
    """The ids of the prompt and of the response so far."""
    return np.concatenate((stream.request.input_ids, np.array(stream.ids, dtype=np.int32)))


def _rows(stream: Stream) -> NDArray[Any]:
    """The companion's rows, which came with the end."""
    (rows,) = (stream.last.context_rows or {}).values()
    return rows.values


async def seam(engine: ServerEngine, companion: Companion) -> list[NDArray[Any]]:
    """The rows of an aborted response, of its continuation, and of both in one pass.

    Raises:
        EngineError: if a response breaks off.
    """
    async with reading(engine, _LONG, None, companion) as first:
        await first.cut(_BEGUN)
    known = _context(first)
    more = await whole(engine, _SHORT, known, companion, len(known) - 1)
    return [_rows(first), _rows(more), await _routed(engine, _context(more)[:-1], companion)]


async def prove(
    engine: ServerEngine, folder: str, companion: Companion | None = None
) -> tuple[list[Stream], list[NDArray[Any]]]:
    """Load the server's own folder, `folder` with other weights of the model, and its own again.
    Whatever happens, its own weights are loaded at the end, under the label that they had.

    With a `companion`, its routed experts, the other weights are loaded in a retract amid a
    response.

    Returns:
        Fresh responses: before, after the server's own folder was loaded again, under the other
        weights, and after its own had come back. With a companion also the routed experts of the
        tokens before the retract: those that came with the response, of one pass under the new
        weights, and of one under the old.

    Raises:
        LeftOut: if its weights are in no folder.
        EngineError: if the server does not do what is asked.
    """
    if version_number(label := engine.facts.label):
        why = f"its weights are those of version {label}, and of no folder"
        raise LeftOut(warned(f"not tried: {why}"))
    own, fresh = Path(engine.facts.model_path), [await whole(engine)]
    try:
        await _load(engine, own, 0)
        fresh.append(await whole(engine))
        async with reading(engine, _LONG if companion else 1, None, companion) as amid:
            await until(lambda: len(amid) >= _BEGUN or amid.done)
            older = _context(amid)[:-1]
            await _load(engine, Path(folder), 1)
            await amid.cut(len(amid) + 1)
        fresh.append(await whole(engine))
        rows: list[NDArray[Any]] = []
        if companion is not None:
            rows = [_rows(amid)[: len(older)], await _routed(engine, older, companion)]
    finally:
        await despite_cancellation(_take_back(engine, own))
    fresh.append(await whole(engine))
    if companion is not None:
        rows.append(await _routed(engine, older, companion))
    return fresh, rows


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
    return _rows(await whole(engine, 1, context, companion))


def proof(fresh: Sequence[Stream]) -> Verdict:
    """Whether fresh responses, as :func:`prove` returns them, show the weights that were loaded."""
    before, *after = fresh
    changed = [_differ(before, each) for each in after]
    means = ", ".join(f"{each.logprobs.mean():.4f}" for each in fresh)
    seen = f"mean logprobs before, of its own folder, of the other, and of its own: {means}"
    if changed != [False, True, False]:
        return failed(seen, "give other weights than its own, or update it in another way")
    return passed(seen)


def _differ(one: Stream, other: Stream) -> bool:
    gap = np.abs(one.logprobs - other.logprobs).max() if one.ids == other.ids else np.inf
    return bool(gap > _DIFFERENCE)
