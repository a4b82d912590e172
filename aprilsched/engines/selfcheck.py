"""The checks that stand between an engine's return and its use: seconds, and harmless.

They ask what a run needs of any engine, through its protocol alone, so they are the same for a
server, for one behind a router and for the embedded engine: it tells its version, it generates as
many tokens as it is asked for with logprobs that are numbers, it pauses and goes on with a request
inside, and it gives that request back when it is aborted. A process that answers ``/health`` has
shown none of these.

That the same prompt gets the same greedy answer twice is not asked: on a GPU the second one meets
a cached prefix, which is computed in another order, and a near tie may go the other way.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import numpy as np

from aprilsched.engines.base import Chunk, Engine, GenerationRequest
from aprilsched.errors import EngineError, EngineProtocolError, TornWeights
from aprilsched.types import SamplingParams

__all__ = ["check"]

_SHORT = 4
_LONG = 256
"""Tokens: enough that a pause meets the request in its middle, about a second's work."""
_ABORT_AGAIN_S = 0.25
_CONTINUE_S = 5.0
"""For the continue of a check that was given up in its pause."""


async def check(engine: Engine) -> int | None:
    """Examine an open engine that nobody else uses; how long it may take is the caller's to bound.

    Returns:
        The version that it says it has; None if its weights are torn: the next refit mends that,
        so its logprobs may be anything.

    Raises:
        EngineError: it does not do what a run needs; the message says what.
    """
    # Whoever lost it may have left it paused.
    await engine.resume()
    try:
        version: int | None = await engine.version()
    except TornWeights:
        version = None
    await _check_tokens(engine, finite=version is not None)
    await _check_pause_and_abort(engine)
    return version


async def _check_tokens(engine: Engine, *, finite: bool) -> None:
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
        # With its first tokens it is registered: an abort that comes earlier is lost.
        first = await anext(chunks, None)
        if first is None or first.finish is not None:
            return
        try:
            await engine.pause("retract")
            await engine.resume()
        except BaseException:
            # Whoever gives the check up, because the engine has left the fleet, say, may never look
            # at it again.
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(_CONTINUE_S):
                    await engine.resume()
            raise
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
        sampling=SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True),
    )
