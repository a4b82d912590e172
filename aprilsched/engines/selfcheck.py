"""The checks that an engine must pass before it is used again after a loss.

They take seconds and do no harm. They use only the engine's protocol, so they are the same for a
server, for a server behind a router and for the embedded engine. They check what a run needs: the
engine tells its version, it generates as many tokens as it is asked for with finite logprobs, it
pauses and continues with a request in it, and it ends that request when it is aborted. A process
that answers ``/health`` has shown none of these.

The checks do not compare two greedy answers to the same prompt: on a GPU the second one meets a
cached prefix, which is computed in another order, so that a near tie may go the other way.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress

import numpy as np

from aprilsched.engines.base import Chunk, Engine, GenerationRequest
from aprilsched.errors import EngineError, EngineProtocolError, InconsistentWeights
from aprilsched.types import SamplingParams

_SHORT = 4
_LONG = 256
"""Tokens of the request that is paused: about a second's work, so that the pause meets it."""
_ABORT_AGAIN_S = 0.25
_CONTINUE_S = 5.0
"""Bound for the continue of an engine whose pause was cancelled."""


async def check(engine: Engine) -> int | None:
    """Check an open engine that nobody else uses; the caller bounds how long it may take.

    Returns:
        The version that the engine reports; None if its weights are inconsistent. The next refit
        repairs such weights, so their logprobs are not checked.

    Raises:
        EngineError: if the engine does not do what a run needs; the message says what.
    """
    # The client that lost the engine may have left it paused.
    await engine.resume()
    try:
        version: int | None = await engine.version()
    except InconsistentWeights:
        version = None
    await check_tokens(engine, finite=version is not None)
    await _check_pause_and_abort(engine)
    return version


@asynccontextmanager
async def pause_during(engine: Engine) -> AsyncGenerator[None]:
    """Pause an engine by "retract" for the block; it continues however the block ends.

    Raises:
        EngineError: if it does not pause or continue.
    """
    try:
        await engine.pause("retract")
        yield
        await engine.resume()
    except BaseException:
        # After a cancellation (because the engine has left the fleet, for example) nobody may ever
        # resume the engine.
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_CONTINUE_S):
                await engine.resume()
        raise


async def check_tokens(engine: Engine, *, finite: bool) -> None:
    """Check that an engine generates a few tokens, with `finite` logprobs where these are due.

    Others may use the engine meanwhile.

    Raises:
        EngineError: if it does not; the message says what it did.
    """
    tokens, finish = 0, None
    async with aclosing(engine.generate(_request(_SHORT))) as chunks:
        async for chunk in chunks:
            ids, logprobs, finish = chunk.token_ids, chunk.logprobs, chunk.finish
            tokens += len(ids)
            if len(ids) != len(logprobs) or (finite and not np.isfinite(logprobs).all()):
                why = f"gave {len(ids)} tokens with the logprobs {logprobs[:_SHORT].tolist()}."
                raise EngineProtocolError(engine.name, why)
    if finish != "length" or tokens != _SHORT:
        why = f"gave {tokens} tokens and the end {finish!r} where {_SHORT} tokens were asked for."
        raise EngineProtocolError(engine.name, why)


async def _check_pause_and_abort(engine: Engine) -> None:
    request = _request(_LONG)
    async with aclosing(engine.generate(request)) as chunks:
        # The first tokens show that the request is registered: an earlier abort would be lost.
        first = await anext(chunks, None)
        if first is None or first.finish is not None:
            return
        async with pause_during(engine):
            pass
        reading = asyncio.ensure_future(_read_to_end(chunks))
        try:
            while not reading.done():
                await engine.abort(request.request_id)
                await asyncio.wait([reading], timeout=_ABORT_AGAIN_S)
            reading.result()
        finally:
            reading.cancel()
            await asyncio.wait([reading])


async def _read_to_end(chunks: AsyncGenerator[Chunk, None]) -> None:
    async for _ in chunks:
        pass


def _request(tokens: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"aprilsched-{uuid.uuid4().hex}",
        input_ids=np.zeros(1, dtype=np.int32),
        # A vLLM server with --return-sampling-mask refuses a temperature of 0.
        sampling=SamplingParams(max_new_tokens=tokens, top_k=1, ignore_eos=True),
    )
