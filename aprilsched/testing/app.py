"""The modelled routes of SGLang's HTTP API, and which of them need the admin key."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aprilsched.engines.base import Chunk, GenerationRequest
from aprilsched.engines.sim.settings import SimConfig
from aprilsched.engines.sim.sim_engine import TAGS
from aprilsched.errors import ConfigError, EngineError, EngineRejected
from aprilsched.serving import (
    BODIES,
    DONE,
    STREAM_HEADERS,
    AbortBody,
    AdapterBody,
    Bodies,
    BroadcastBody,
    Crashed,
    DiskBody,
    Event,
    GenerateBody,
    Item,
    JoinBody,
    LeaveBody,
    Malformed,
    MemoryBody,
    PauseBody,
    Refused,
    TensorBody,
    VersionBody,
    as_json,
    asking_for,
    body_of,
    expect_later,
    finish_reason,
    framed,
    openapi_answer,
    refusing,
    token_logprobs,
)
from aprilsched.testing.faults.middleware import spoil
from aprilsched.testing.served import SERVED, Call, ServedEngine, ServedRequests
from aprilsched.types import SamplingParams

# Makes the request of the embedded engine from a body, and refuses what SGLang would refuse.
#
# An unknown sampling parameter fails the request, as in SGLang.

_DEFAULT_NEW_TOKENS = 128


class _Sampling(msgspec.Struct, frozen=True):
    """SGLang's sampling parameters and their defaults; those after `n` are not modelled."""

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    n: int = 1

    stream_interval: int | None = None
    stop: Any = None
    stop_regex: Any = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    custom_params: Any = None


def known_parameters(body: GenerateBody) -> None:
    """Fail like SGLang at a sampling parameter that it does not know.

    Raises:
        Crashed: if there is one.
    """
    if not (body.sampling_params or {}).keys() <= set(_Sampling.__struct_fields__):
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
    sampling = _sampling(body.sampling_params or {}, config.vocab_size)
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
    )


def _sampling(given: dict[str, Any], vocab_size: int) -> SamplingParams:
    try:
        params = msgspec.convert(given, _Sampling)
    except msgspec.ValidationError as error:
        raise Refused(f"sampling_params: {error}.") from error
    for key in params.logit_bias or {}:
        if not (key.isdecimal() and int(key) < vocab_size):
            raise Refused(f"logit_bias must has keys in [0, {vocab_size - 1}], got {key}.")
    if params.n != 1:
        raise Refused(f"n is {params.n}; this engine gives one response for each request.")
    new = _DEFAULT_NEW_TOKENS if params.max_new_tokens is None else params.max_new_tokens
    try:
        return SamplingParams(
            max_new_tokens=new,
            min_new_tokens=params.min_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            stop_token_ids=tuple(params.stop_token_ids or ()),
            ignore_eos=params.ignore_eos,
            sampling_seed=params.sampling_seed,
        )
    except ConfigError as error:
        raise Refused(str(error)) from error


# --- generate answers ----------------------------------------------------------------------------

# Builds the answers of /generate from chunks, with ``meta_info`` in SGLang's names.


class Answer:
    """Makes the events of one response, and counts the tokens that they have carried."""

    def __init__(self, served: ServedRequests, call: Call, *, logprobs: bool) -> None:
        self._served = served
        self._call = call
        self._logprobs = logprobs
        self._tokens = 0
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
            "prompt_tokens": len(self._call.request.input_ids),
            "weight_version": self._served.label,
            "num_retractions": self._call.retractions,
        }
        if self._logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = token_logprobs(ids, chunk.logprobs.tolist())
            meta["output_token_logprobs_length"] = self._tokens
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = self._tokens
        meta["cached_tokens"] = chunk.cached_tokens or 0
        if chunk.finish is not None:
            meta["weight_versions"] = self._served.labelled(chunk.spans or (), self._tokens)
            meta["e2e_latency"] = asyncio.get_running_loop().time() - self._began
        meta["cached_tokens_details"] = None
        meta["dp_rank"] = None
        return {"output_ids": ids, "meta_info": meta}


# --- generate ------------------------------------------------------------------------------------

# POST /generate: one response, as a whole or as server-sent events.
#
# It behaves like SGLang in the corner cases: a refusal in a stream is an event under status 200;
# an abort after a retract leaves only a multiple of 50 tokens in a whole answer; two seconds after
# a stream its rid is aborted, which hits another request under the same rid.

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


# --- info ----------------------------------------------------------------------------------------

# The handlers of the calls that only read.

_VERSION = "0.5.21"
"""The SGLang release whose answers these are."""
_HEALTH_SECONDS = 20.0
_MICROSECONDS = 1e6

_STRING, _FLAG = {"type": "string"}, {"type": "boolean"}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "AbortReq": {"rid": _STRING, "abort_all": {**_FLAG, "default": False}},
    "ContinueGenerationReqInput": {"torch_empty_cache": {**_FLAG, "default": True}},
    "PauseGenerationReqInput": {
        "mode": {**_STRING, "enum": ["abort", "retract", "in_place"], "default": "abort"}
    },
    "UpdateWeightFromDiskReqInput": {
        "model_path": _STRING,
        "weight_version": _STRING,
        "abort_all_requests": {**_FLAG, "default": False},
        "flush_cache": {**_FLAG, "default": True},
    },
    "UpdateWeightVersionReqInput": {
        "new_version": _STRING,
        "abort_all_requests": {**_FLAG, "default": True},
    },
}


async def model_info(request: web.Request) -> web.Response:
    """GET /model_info."""
    served = request.app[SERVED]
    return as_json(
        {
            "model_path": served.model_path,
            "served_model_name": served.model_path,
            "tokenizer_path": served.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": served.label,
            "load_format": "auto",
            "model_type": "aprilsched-toy",
            "architectures": ["AprilschedToy"],
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info; the field ``simulated`` says that this is not a real SGLang."""
    served = request.app[SERVED]
    config = served.config
    rank = {"effective_max_running_requests_per_dp": config.max_running}
    return as_json(
        {
            "model_path": served.model_path,
            "tokenizer_path": served.model_path,
            "skip_tokenizer_init": True,
            "stream_interval": config.stream_interval,
            "incremental_streaming_output": True,
            "disable_radix_cache": True,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "enable_lora": True,
            "enable_metrics": False,
            "enable_memory_saver": False,
            "enable_weights_cpu_backup": False,
            "max_running_requests": config.max_running,
            "max_total_num_tokens": config.kv_tokens,
            "weight_version": served.label,
            "random_seed": served.random_seed,
            "status": "ready",
            "internal_states": [rank],
            "version": _VERSION,
            "simulated": True,
        }
    )


async def loads(request: web.Request) -> web.Response:
    """GET /v1/loads: the part that SGLang calls core, whatever is asked for.

    Figures that SGLang measures only with --enable-metrics are 0, as without that flag.
    """
    served = request.app[SERVED]
    now, config = served.loads, served.config
    counters, scale = now.counters, served.time_scale
    decode_us = counters.decode_seconds * scale * _MICROSECONDS
    moments = [
        float(counters.steps),
        float(counters.decoded),
        decode_us,
        float(counters.decoded_squares),
        counters.request_seconds * scale * _MICROSECONDS,
        float(counters.decoded),
    ]
    rank = {
        "timestamp": now.timestamp,
        "dp_rank": 0,
        "num_running_reqs": now.running,
        "num_waiting_reqs": now.waiting,
        "num_waiting_uncached_tokens": 0,
        "num_used_tokens": now.kv_in_use,
        "num_total_tokens": now.kv_in_use,
        "num_active_tokens": now.kv_in_use,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": config.kv_tokens,
        "max_running_requests": config.max_running,
        "token_usage": round(now.kv_in_use / config.kv_tokens, 4),
        "gen_throughput": 0.0,
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "total_prefill_uncached_tokens": counters.prefilled - counters.cached,
        "total_prefill_busy_us": int(counters.prefill_seconds * scale * _MICROSECONDS),
        "decode_moments": moments if counters.steps else None,
    }
    return as_json(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": _VERSION,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [rank],
        }
    )


async def ready(request: web.Request) -> web.Response:
    """GET /ready; answers 503 while paused."""
    return web.Response(status=503 if request.app[SERVED].paused else 200)


async def health(request: web.Request) -> web.Response:
    """GET /health and /health_generate; both generate a token, so they hang while paused."""
    well = await one_token(request.app[SERVED], _HEALTH_SECONDS)
    return web.Response(status=200 if well else 503)


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    served = request.app[SERVED]
    model = {
        "id": served.model_path,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": served.model_path,
        "parent": None,
        "max_model_len": served.config.kv_tokens,
    }
    return as_json({"object": "list", "data": [model]})


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: the paths, and the bodies that clients look up."""
    return openapi_answer(request, "FastAPI", "0.1.0", _SCHEMAS)


# --- control handlers ----------------------------------------------------------------------------

# The handlers of the control calls, with SGLang's defaults.

_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_NOT_FLUSHED = "Flush cache failed.\n"


async def pause(request: web.Request) -> web.Response:
    """POST /pause_generation."""
    body = await body_of(request, PauseBody)
    await request.app[SERVED].pause(body.mode)
    return as_json({"message": "Generation paused successfully.", "status": "ok"})


async def resume(request: web.Request) -> web.Response:
    """POST /continue_generation; a body is required, even if it is empty."""
    await body_of(request, dict[str, Any])
    await request.app[SERVED].resume()
    return as_json({"message": "Generation continued successfully.", "status": "ok"})


async def abort(request: web.Request) -> web.Response:
    """POST /abort_request; answers 200 whether or not the request exists."""
    body = await body_of(request, AbortBody)
    if body.abort_all:
        await request.app[SERVED].abort_all()
    elif body.rid:
        await request.app[SERVED].abort(body.rid)
    return web.Response()


async def flush(request: web.Request) -> web.Response:
    """POST /flush_cache; 400 while the cache is in use."""
    try:
        seconds = float(request.query.get("timeout", "0"))
    except ValueError as error:
        raise Malformed("timeout: Input should be a valid number") from error
    if not 0 <= seconds < float("inf"):
        raise Malformed("timeout: Input should be greater than or equal to 0")
    done = await request.app[SERVED].flush(seconds)
    return web.Response(status=200 if done else 400, text=_FLUSHED if done else _NOT_FLUSHED)


async def update_from_disk(request: web.Request) -> web.Response:
    """POST /update_weights_from_disk."""
    served = request.app[SERVED]
    body = await body_of(request, DiskBody)
    if body.abort_all_requests:
        await served.abort_all()
    why_not = await served.update(body.model_path, body.weight_version, flush=body.flush_cache)
    message = "Succeeded to update model weights."
    if body.weight_version is not None:
        message += f" Weight version updated to {body.weight_version}."
    content = {
        "success": why_not is None,
        "message": message if why_not is None else f"Failed to update weights: {why_not}",
        "num_paused_requests": 0,
    }
    return as_json(content, 200 if why_not is None else 400)


async def update_version(request: web.Request) -> web.Response:
    """POST /update_weight_version."""
    served = request.app[SERVED]
    body = await body_of(request, VersionBody)
    if body.abort_all_requests:
        await served.abort_all()
    await served.relabel(body.new_version)
    label = body.new_version
    message = f"Weight version updated to {label}"
    return as_json({"success": True, "message": message, "new_version": label})


async def load_adapter(request: web.Request) -> web.Response:
    """POST /load_lora_adapter; running requests continue."""
    served = request.app[SERVED]
    body = await body_of(request, AdapterBody)
    return _adapters(await served.load_adapter(body.lora_name, body.lora_path), served.adapters)


async def unload_adapter(request: web.Request) -> web.Response:
    """POST /unload_lora_adapter; answers when the adapter's last request has ended."""
    served = request.app[SERVED]
    body = await body_of(request, AdapterBody)
    return _adapters(await served.unload_adapter(body.lora_name), served.adapters)


def _adapters(why_not: str | None, loaded: dict[str, str]) -> web.Response:
    content = {
        "rid": None,
        "success": why_not is None,
        "error_message": why_not or "",
        "loaded_adapters": loaded,
    }
    return as_json(content, 200 if why_not is None else 400)


async def release(request: web.Request) -> web.Response:
    """POST /release_memory_occupation."""
    return await _memory(request, request.app[SERVED].engine.release)


async def wake(request: web.Request) -> web.Response:
    """POST /resume_memory_occupation."""
    return await _memory(request, request.app[SERVED].engine.wake)


async def _memory(
    request: web.Request, call: Callable[[Sequence[str]], Awaitable[None]]
) -> web.Response:
    body = await body_of(request, MemoryBody)
    try:
        await call(body.tags or TAGS)
    except EngineRejected as error:
        raise Crashed from error
    return as_json(None)


async def update_from_tensor(request: web.Request) -> web.Response:
    """POST /update_weights_from_tensor; nothing is opened, and any content makes new weights."""
    body = await body_of(request, TensorBody)
    why_not = await request.app[SERVED].take_bucket("".join(body.serialized_named_tensors).encode())
    return _session(why_not is None, why_not or "")


async def update_from_distributed(request: web.Request) -> web.Response:
    """POST /update_weights_from_distributed; nothing is received, and any names make new
    weights."""
    served = request.app[SERVED]
    body = await body_of(request, BroadcastBody)
    if body.group_name not in served.groups:
        return _session(False, f"Group {body.group_name} not in groups.")
    why_not = await served.take_bucket(",".join(body.names).encode())
    return _session(why_not is None, why_not or "")


async def join_group(request: web.Request) -> web.Response:
    """POST /init_weights_update_group."""
    body = await body_of(request, JoinBody)
    joined = request.app[SERVED].join_group(body.group_name, body.rank_offset, body.world_size)
    return _session(joined, f"The group {body.group_name} exists already.")


async def leave_group(request: web.Request) -> web.Response:
    """POST /destroy_weights_update_group."""
    body = await body_of(request, LeaveBody)
    left = request.app[SERVED].leave_group(body.group_name)
    return _session(left, f"The group {body.group_name} does not exist.")


async def begin_update(request: web.Request) -> web.Response:
    """POST /begin_weight_update; refused while one is open."""
    await body_of(request, dict[str, Any])
    done = request.app[SERVED].begin_update()
    return _session(done, "an update is open already; end it first")


async def end_update(request: web.Request) -> web.Response:
    """POST /end_weight_update; refused unless one is open."""
    await body_of(request, dict[str, Any])
    done = request.app[SERVED].end_update()
    return _session(done, "no update is open; begin one first")


def _session(done: bool, why_not: str) -> web.Response:
    content = {"success": done, "message": "Success" if done else why_not}
    return as_json(content, 200 if done else 400)


# --- app -----------------------------------------------------------------------------------------

_LARGEST_BODY = 2**28

_OPEN: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/generate", generate),
    ("GET", "/model_info", model_info),
    ("GET", "/get_model_info", model_info),
    ("GET", "/server_info", server_info),
    ("GET", "/get_server_info", server_info),
    ("GET", "/openapi.json", openapi),
    ("GET", "/v1/loads", loads),
    ("GET", "/v1/models", models),
    ("GET", "/ready", ready),
    ("GET", "/health", health),
    ("GET", "/health_generate", health),
)
_ADMIN: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/pause_generation", pause),
    ("POST", "/continue_generation", resume),
    ("POST", "/abort_request", abort),
    ("GET", "/flush_cache", flush),
    ("POST", "/flush_cache", flush),
    ("POST", "/update_weights_from_disk", update_from_disk),
    ("POST", "/update_weight_version", update_version),
    ("POST", "/begin_weight_update", begin_update),
    ("POST", "/end_weight_update", end_update),
    ("POST", "/update_weights_from_tensor", update_from_tensor),
    ("POST", "/update_weights_from_distributed", update_from_distributed),
    ("POST", "/init_weights_update_group", join_group),
    ("POST", "/destroy_weights_update_group", leave_group),
    ("POST", "/load_lora_adapter", load_adapter),
    ("POST", "/unload_lora_adapter", unload_adapter),
    ("POST", "/release_memory_occupation", release),
    ("POST", "/resume_memory_occupation", wake),
)


def make_app(
    served: ServedEngine, *, admin_key: str | None, outermost: Sequence[Middleware] = ()
) -> web.Application:
    """The web application of `served`; the `outermost` middlewares see all calls and answers."""
    keys = asking_for(api_key=None, admin_key=admin_key, control={path for _, path, _ in _ADMIN})
    app = web.Application(middlewares=[*outermost, keys, refusing])
    app[BODIES] = Bodies(largest=_LARGEST_BODY, together=2 * _LARGEST_BODY)
    app[SERVED] = served
    for method, path, handler in (*_OPEN, *_ADMIN):
        app.router.add_route(method, path, handler, expect_handler=expect_later)
    return app
