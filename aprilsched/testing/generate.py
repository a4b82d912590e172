"""POST /generate: one response, as a whole or as server-sent events.

It behaves like SGLang in the corner cases: a refusal in a stream is an event under status 200; an
abort after a retract leaves only a multiple of 50 tokens in a whole answer; two seconds after a
stream its rid is aborted, which hits another request under the same rid.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import numpy as np
from aiohttp import web

from aprilsched.engines.base import Chunk
from aprilsched.errors import EngineError
from aprilsched.serving.answers import DONE, STREAM_HEADERS, Item, framed
from aprilsched.serving.bodies import GenerateBody, body_of
from aprilsched.serving.refusals import Refused, as_json
from aprilsched.testing.faults.middleware import spoil
from aprilsched.testing.generate_answers import Answer
from aprilsched.testing.requests import generation_request, known_parameters
from aprilsched.testing.served import SERVED, Call, ServedEngine

__all__ = ["generate", "one_token"]

_KEPT = 50
"""Tokens between two reports of SGLang's scheduler about a request that is not streamed."""
_LATE_ABORT_SECONDS = 2.0


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer one prompt."""
    served = request.app[SERVED]
    body = await body_of(request, GenerateBody)
    known_parameters(body)
    rid = body.rid or uuid.uuid4().hex
    if body.stream:
        return await _streamed(request, served, body, rid)
    call = Call(generation_request(body, rid, served.config))
    chunk = await _whole(served, call)
    return as_json(Answer(served, call, logprobs=body.return_logprob).event(chunk))


async def _streamed(
    request: web.Request, served: ServedEngine, body: GenerateBody, rid: str
) -> web.StreamResponse:
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    try:
        async with (
            aclosing(_items(served, body, rid)) as sent,
            aclosing(spoil(request, sent)) as items,
        ):
            async for item in items:
                await response.write(framed(item))
    except EngineError:
        if request.transport is not None:
            request.transport.abort()  # The engine is gone, so its connection breaks.
        return response
    except ConnectionResetError:  # The client is gone.
        return response
    served.abort_later(_LATE_ABORT_SECONDS, rid)
    return response


async def _items(served: ServedEngine, body: GenerateBody, rid: str) -> AsyncGenerator[Item, None]:
    try:
        call = Call(generation_request(body, rid, served.config))
        answer = Answer(served, call, logprobs=body.return_logprob)
        async with aclosing(served.generate(call)) as chunks:
            async for chunk in chunks:
                yield answer.event(chunk)
    except Refused as refusal:
        yield refusal.event()
    yield DONE


async def _whole(served: ServedEngine, call: Call) -> Chunk:
    """Join all chunks of a response into one."""
    async with aclosing(served.generate(call)) as found:
        chunks = [chunk async for chunk in found]
    last = chunks[-1]
    ids = np.concatenate([chunk.token_ids for chunk in chunks])
    logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
    if last.finish == "abort" and served.retracted:
        kept = len(ids) // _KEPT * _KEPT
        ids, logprobs = ids[:kept], logprobs[:kept]
    return replace(last, token_ids=ids, logprobs=logprobs)


async def one_token(served: ServedEngine, seconds: float) -> bool:
    """Whether the engine generates a token within `seconds`, as SGLang's health checks test."""
    body = GenerateBody(input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0.0})
    rid = f"HEALTH_CHECK_{uuid.uuid4().hex}"
    try:
        async with asyncio.timeout(seconds):
            await _whole(served, Call(generation_request(body, rid, served.config)))
    except (TimeoutError, EngineError):
        return False
    return True
