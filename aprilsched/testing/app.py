"""What the test server has of SGLang's HTTP API beside the calls of every backend.

These are ``/generate``, adapters, and the memory of the engine.
"""

from __future__ import annotations

import asyncio
import uuid
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
from aiohttp import web
from aiohttp.typedefs import Middleware

from aprilsched.agents.dialects.sglang import (
    GenerateBody,
    finish_reason,
    likely_triples,
    token_logprobs,
)
from aprilsched.agents.serving.bodies import Bodies, body_of, decode
from aprilsched.agents.serving.calls import make_app
from aprilsched.agents.serving.refusals import Crashed, Refused, as_json, error_event
from aprilsched.agents.serving.streams import DONE, Event, Item, merged, send_stream
from aprilsched.errors import AprilschedError, ConfigError, EngineError, EngineRejected
from aprilsched.kernel.engines.base import Chunk, GenerationRequest
from aprilsched.kernel.values.checks import OWN
from aprilsched.kernel.values.companions import MOST_KEPT, TOP, Companion, top_logprobs
from aprilsched.kernel.values.sampling import SERVER, sampling_params
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.simulation.engine.sim_engine import TAGS
from aprilsched.testing.served import SERVED, Call, ServedEngine
from aprilsched.types import SamplingParams

# Makes the request of the embedded engine from a body, and refuses what SGLang would refuse.

_DEFAULT_NEW_TOKENS = 128
_KNOWN = {*OWN, *SERVER, "n", "stop", "stream_interval"}
"""SGLang's sampling parameters; those of the server's own are not modelled."""


_TOLD = ("priority", "data_parallel_rank", "custom_logit_processor", "return_hidden_states")
_KEPT = ("request",)
"""The last event of an answer has those of these fields that the request had, under this name, so
that tests see what arrives."""


def known_parameters(body: GenerateBody) -> None:
    """Fail like SGLang at a sampling parameter that it does not know.

    Raises:
        Crashed: if there is one.
    """
    if not (body.sampling_params or {}).keys() <= _KNOWN:
        raise Crashed


def generation_request(body: GenerateBody, rid: str, config: SimConfig) -> GenerationRequest:
    """The request that `body` asks for.

    Raises:
        Refused: if SGLang, or this model of it, would refuse it.
    """
    if body.text is not None:
        raise Refused("The engine has no tokenizer and cannot take text; provide input_ids.")
    if body.input_ids is None:
        raise Refused("Either text, input_ids or input_embeds should be provided.")
    if not body.input_ids:
        raise Refused("input_ids cannot be empty.")
    fields = {name: getattr(body, name) for name in _TOLD if getattr(body, name)}
    sampling = replace(
        _sampling(body.sampling_params or {}, config.vocab_size), request=fields, keep=_KEPT
    )
    largest, smallest = max(body.input_ids), min(body.input_ids)
    if smallest < 0 or largest >= config.vocab_size:
        wrong = smallest if smallest < 0 else largest
        raise Refused(f"input_ids must be in [0, {config.vocab_size - 1}], got {wrong}.")
    ids = np.array(body.input_ids, np.int32)
    return GenerationRequest(
        request_id=rid,
        input_ids=ids,
        sampling=sampling,
        adapter=body.lora_path,
        cache_key=body.extra_key,
        companions=_companions(body, len(ids), sampling, config),
        media=body.media,
        rank=body.priority or 0,
    )


def _companions(
    body: GenerateBody, prompt: int, sampling: SamplingParams, config: SimConfig
) -> tuple[tuple[Companion, int], ...]:
    found: list[tuple[Companion, int]] = []
    if body.return_routed_experts:
        start = body.routed_experts_start_len
        if not 0 <= start <= prompt:
            raise Refused(f"routed_experts_start_len is {start}, outside of 0 to {prompt}.")
        found.append((Companion("routed_experts", "uint8", config.rows), start))
    if body.return_indexer_topk:
        found.append((Companion("indexer_topk", "int32", config.rows), 0))
    if body.return_sampling_mask:
        if sampling.temperature > 0 and not 1 <= sampling.top_k <= MOST_KEPT:
            raise Refused(
                "return_sampling_mask requires top_k=1 for greedy sampling or finite "
                f"1 < top_k <= {MOST_KEPT}; got top_k={sampling.top_k}."
            )
        found.append((Companion("sampling_mask"), 0))
    if body.top_logprobs_num > 0:
        found.append((top_logprobs(body.top_logprobs_num), 0))
    return tuple(found)


def _sampling(given: dict[str, Any], vocab_size: int) -> SamplingParams:
    n = given.get("n")
    if n not in (None, 1):
        raise Refused(f"n is {n}; this engine gives one response for each request.")
    names = [name for name in (*OWN, *SERVER) if given.get(name) is not None]
    try:
        sampling = sampling_params(
            {"max_new_tokens": _DEFAULT_NEW_TOKENS} | {name: given[name] for name in names}
        )
    except ConfigError as error:
        raise Refused(str(error)) from error
    for key in sampling.extra.get("logit_bias", ()):
        if not (key.isdecimal() and int(key) < vocab_size):
            raise Refused(f"logit_bias must has keys in [0, {vocab_size - 1}], got {key}.")
    return replace(sampling, extra={})


# --- generate answers ----------------------------------------------------------------------------

# Builds the answers of /generate from chunks, with ``meta_info`` in SGLang's names.


class Answer:
    """Makes the events of one response, and counts the tokens that they have carried."""

    def __init__(self, served: ServedEngine, call: Call, *, logprobs: bool) -> None:
        self._served = served
        self._call = call
        self._logprobs = logprobs
        self._tokens = 0
        self._masks = 0
        self._began = asyncio.get_running_loop().time()

    def event(self, chunk: Chunk) -> Event:
        """The event that carries the tokens of `chunk`, all of which are new."""
        ids: list[int] = chunk.token_ids.tolist()
        self._tokens += len(ids)
        meta: dict[str, Any] = {
            "id": self._call.request.request_id,
            "finish_reason": finish_reason(
                chunk.finish, tokens=self._tokens, last=ids[-1] if ids else 0
            ),
            "prompt_tokens": chunk.prompt_tokens or len(self._call.request.input_ids),
            "weight_version": self._served.label,
            "num_retractions": self._call.retractions,
        }
        if chunk.busy is not None:
            busy = {"message": str(chunk.busy), "status_code": chunk.busy.status}
            meta["finish_reason"] |= busy
        if self._logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = token_logprobs(ids, chunk.logprobs.tolist())
            meta["output_token_logprobs_length"] = self._tokens
        for name, rows in (chunk.token_rows or {}).items():
            if name == TOP:
                meta["output_top_logprobs"] = likely_triples(rows, rows.values.shape[1])
                continue
            self._masks += len(rows)
            meta["output_token_sampling_mask"] = [
                rows.row(index).tolist() for index in range(len(rows))
            ]
            meta["output_token_sampling_mask_length"] = self._masks
        for name, rows in (chunk.context_rows or {}).items():
            meta[name] = b64encode(rows.values.astype("<i4").tobytes()).decode()
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = self._tokens
        meta["cached_tokens"] = chunk.cached_tokens or 0
        if chunk.finish is not None:
            meta["weight_versions"] = self._served.labelled(chunk.spans or (), self._tokens)
            meta["e2e_latency"] = asyncio.get_running_loop().time() - self._began
            meta |= {} if chunk.answer is None else chunk.answer.values
        meta["cached_tokens_details"] = None
        meta["dp_rank"] = None
        return {"output_ids": ids, "meta_info": meta}


# --- generate ------------------------------------------------------------------------------------

# POST /generate: a response to one prompt, or to each of several, as a whole or as server-sent
# events.
#
# It behaves like SGLang in the corner cases: a refusal in a stream is an event under status 200,
# and two seconds after a stream its rid is aborted, which hits another request of the same rid.

Items: TypeAlias = AsyncGenerator[Item, None]

STREAM_FILTER: web.RequestKey[Callable[[Items], Items]] = web.RequestKey("stream_filter")
"""The key under which a middleware may leave a function that changes the items of a stream."""

_LATE_ABORT_SECONDS = 2.0
_LISTED = ("input_ids", "rid", "sampling_params", "extra_key", "lora_path", "return_logprob")
"""The fields that have a value for each prompt of a body, where they are lists."""


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
    """Whether a body asks for several responses, and a body for each of them. As in SGLang, only
    some fields have a value for each."""
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
        # SGLang begins none of a body's requests if it refuses one of them. When the others had
        # begun here, they were still running when the client sent them again, one by one.
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


# --- adapters and memory -------------------------------------------------------------------------


class _AdapterBody(msgspec.Struct, frozen=True):
    """Body of POST /load_lora_adapter and /unload_lora_adapter; unloading needs no path."""

    lora_name: str
    lora_path: str = ""


class _MemoryBody(msgspec.Struct, frozen=True):
    """Body of POST /release_memory_occupation and /resume_memory_occupation.

    Without `tags` the call is for all parts.
    """

    tags: list[str] | None = None


async def load_adapter(request: web.Request) -> web.Response:
    """POST /load_lora_adapter; running requests continue."""
    served, body = request.app[SERVED], await body_of(request, _AdapterBody)
    return await _adapters(served, served.load_adapter(body.lora_name, body.lora_path))


async def unload_adapter(request: web.Request) -> web.Response:
    """POST /unload_lora_adapter; answers when the adapter's last request has ended."""
    served, body = request.app[SERVED], await body_of(request, _AdapterBody)
    return await _adapters(served, served.unload_adapter(body.lora_name))


async def _adapters(served: ServedEngine, call: Awaitable[None]) -> web.Response:
    why_not = ""
    try:
        await call
    except AprilschedError as error:
        why_not = str(error)
    content = {"rid": None, "success": not why_not, "error_message": why_not}
    return as_json({**content, "loaded_adapters": served.adapters}, 400 if why_not else 200)


async def memory(request: web.Request) -> web.Response:
    """POST /release_memory_occupation and /resume_memory_occupation."""
    engine, body = request.app[SERVED].engine, await body_of(request, _MemoryBody)
    call = engine.release if request.path == _RELEASE else engine.wake
    try:
        await call(body.tags or TAGS)
    except EngineRejected as error:
        raise Crashed from error
    return as_json(None)


_RELEASE = "/release_memory_occupation"
_LARGEST_BODY = 2**28


def app_of(
    served: ServedEngine, *, admin_key: str | None, outermost: Sequence[Middleware] = ()
) -> web.Application:
    """The web application of `served`; the `outermost` middlewares see all calls and answers."""
    app = make_app(
        served,
        served,
        Bodies(largest=_LARGEST_BODY, together=2 * _LARGEST_BODY),
        requests=[("POST", "/generate", generate)],
        control=[
            ("POST", "/load_lora_adapter", load_adapter),
            ("POST", "/unload_lora_adapter", unload_adapter),
            ("POST", _RELEASE, memory),
            ("POST", "/resume_memory_occupation", memory),
        ],
        admin_key=admin_key,
        outermost=outermost,
    )
    app[SERVED] = served
    return app
