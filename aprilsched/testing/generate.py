"""POST /generate: a response to one prompt, or to each of several, as a whole or as server-sent
events.

It behaves like SGLang in corner cases: a refusal in a stream is an event under status 200, and two
seconds after a stream its rid is aborted, which also hits a later request with the same rid.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, cast

import msgspec
from aiohttp import web

from aprilsched.agents.dialects.sglang import GenerateBody
from aprilsched.agents.serving.bodies import body_of, decode
from aprilsched.agents.serving.refusals import Refused, as_json, error_event
from aprilsched.agents.serving.streams import DONE, Item, merged, send_stream
from aprilsched.errors import EngineError
from aprilsched.testing.generate_answers import Answer
from aprilsched.testing.generate_request import generation_request, known_parameters
from aprilsched.testing.served import SERVED, Call, ServedEngine

Items: TypeAlias = AsyncGenerator[Item, None]

STREAM_FILTER: web.RequestKey[Callable[[Items], Items]] = web.RequestKey("stream_filter")
"""The key under which a middleware may store a function that changes the items of a stream."""

_LATE_ABORT_SECONDS = 2.0
_LISTED = ("input_ids", "rid", "sampling_params", "extra_key", "lora_path", "return_logprob")
"""The fields that, as lists, contain one value for each prompt of a body."""


async def generate(request: web.Request) -> web.StreamResponse:
    """Answer one prompt, or several of one body."""
    served = request.app[SERVED]
    whole = await body_of(request, dict[str, Any])
    several, bodies = _bodies(whole)
    for body in bodies:
        known_parameters(body)
    rids = [body.rid or uuid.uuid4().hex for body in bodies]
    if bodies[0].stream:
        sent = _items(served, bodies, rids, several=several)
        return await send_stream(request, _until_aborted(request, served, sent, rids))
    calls = _calls(served, bodies, rids)
    chunks = await asyncio.gather(*map(served.whole, calls))
    answers = [
        Answer(served, call, logprobs=body.return_logprob).event(chunk)
        for body, call, chunk in zip(bodies, calls, chunks, strict=True)
    ]
    return as_json(answers if several else answers[0])


def _bodies(whole: dict[str, Any]) -> tuple[bool, list[GenerateBody]]:
    """Return whether a body requests several responses, and a body for each. As in SGLang, only
    some fields have one value per response."""
    prompts = cast("list[Any]", whole.get("input_ids") or [])
    if not (prompts and isinstance(prompts[0], list)):
        return False, [decode(msgspec.json.encode(whole), GenerateBody)]
    listed = [name for name in _LISTED if isinstance(whole.get(name), list)]
    if any(len(whole[name]) != len(prompts) for name in listed):
        raise Refused("A list of the body has another length than input_ids.")
    each = [{name: whole[name][place] for name in listed} for place in range(len(prompts))]
    return True, [decode(msgspec.json.encode({**whole, **own}), GenerateBody) for own in each]


def _calls(served: ServedEngine, bodies: Sequence[GenerateBody], rids: Sequence[str]) -> list[Call]:
    pairs = zip(bodies, rids, strict=True)
    calls = [Call(generation_request(body, rid, served.config)) for body, rid in pairs]
    if len(calls) > 1:
        # SGLang starts none of a body's requests if it refuses one of them. If the others started
        # here, they would still be running when the client resends them one by one.
        for call in calls:
            served.check(call)
    return calls


async def _until_aborted(
    request: web.Request, served: ServedEngine, sent: Items, rids: Sequence[str]
) -> Items:
    try:
        async with (
            aclosing(sent),
            aclosing(request.get(STREAM_FILTER, _unchanged)(sent)) as items,
        ):
            async for item in items:
                yield item
    except EngineError:
        if request.transport is not None:
            request.transport.abort()  # The engine is gone, so its connection breaks.
    else:
        for rid in rids:
            served.abort_later(_LATE_ABORT_SECONDS, rid)


def _unchanged(items: Items) -> Items:
    return items


async def _items(
    served: ServedEngine, bodies: Sequence[GenerateBody], rids: Sequence[str], *, several: bool
) -> Items:
    try:
        calls = _calls(served, bodies, rids)
        answers = [Answer(served, call, logprobs=bodies[0].return_logprob) for call in calls]
        async with aclosing(merged([served.generate(call) for call in calls])) as found:
            async for index, chunk in found:
                event = answers[index].event(chunk)
                yield {**event, "index": index} if several else event
    except Refused as refusal:
        yield error_event(str(refusal), refusal.status)
    yield DONE
