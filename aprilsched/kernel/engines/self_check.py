"""The checks that an engine must pass before it is used again after a loss.

They take seconds and do no harm. They use only the engine's protocol, so they are the same for a
server, for a server behind a router and for the embedded engine. They are the first of the checks
of :mod:`aprilsched.testing.contract`, which tests of engines and ``aprilsched doctor`` make.

The checks do not compare two greedy responses to the same prompt: on a GPU the second one meets a
cached prefix, which is computed in another order, so that a near tie may go the other way.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress

import numpy as np

from aprilsched.errors import EngineError, EngineProtocolError, InconsistentWeights
from aprilsched.kernel.engines.base import Chunk, Engine, GenerationRequest
from aprilsched.types import SamplingParams

SHORT_TOKENS = 4
"""Tokens of the response whose logprobs are checked."""
PAUSED_TOKENS = 256
"""Tokens of the response that is paused: about a second's work, so that the pause meets it."""
ABORT_INTERVAL_S = 0.25
"""Seconds between two aborts of a response that has not ended."""
RESUME_TIMEOUT_S = 5.0
"""Seconds that an engine has to continue after its pause was cancelled."""


async def check(engine: Engine) -> int | None:
    """Check an open engine that no other client uses; the caller limits the time.

    Returns:
        The version that the engine reports; None if its weights are inconsistent. The next refit
        repairs such weights, so their logprobs are not checked.

    Raises:
        EngineError: if the engine does not do what a run needs; the message has the reason.
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
        # After a cancellation, for example because the engine left the fleet, no other task resumes
        # the engine.
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(RESUME_TIMEOUT_S):
                await engine.resume()
        raise


async def check_tokens(engine: Engine, *, finite: bool) -> None:
    """Check that an engine generates a few tokens, with `finite` logprobs where these are due.

    Other clients may use the engine at the same time.

    Raises:
        EngineError: if it does not; the message has the reason.
    """
    tokens, finish = 0, None
    async with aclosing(engine.generate(_request(SHORT_TOKENS))) as chunks:
        async for chunk in chunks:
            ids, logprobs, finish = chunk.token_ids, chunk.logprobs, chunk.finish
            tokens += len(ids)
            if len(ids) != len(logprobs) or (finite and not np.isfinite(logprobs).all()):
                why = (
                    f"gave {len(ids)} tokens with the logprobs {logprobs[:SHORT_TOKENS].tolist()}."
                )
                raise EngineProtocolError(engine.name, why)
    if finish != "length" or tokens != SHORT_TOKENS:
        why = f"gave {tokens} of {SHORT_TOKENS} tokens, and ended the response with {finish!r}."
        raise EngineProtocolError(engine.name, why)


async def _check_pause_and_abort(engine: Engine) -> None:
    request = _request(PAUSED_TOKENS)
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
                await asyncio.wait([reading], timeout=ABORT_INTERVAL_S)
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
        # Every engine samples at the default temperature. A vLLM server with
        # --return-sampling-mask refuses a temperature of 0, and some engines have no top_k.
        sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True),
    )
