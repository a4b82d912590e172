"""The control calls of the gateway, with SGLang's bodies, defaults and answers."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from aprilsched import __version__
from aprilsched.coordinator.refits import RefitReport
from aprilsched.engines.base import RefitGroup, TensorMeta
from aprilsched.errors import AprilschedError, ConfigError
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.gateway.updates import Bucket, Groups, broadcast, handles
from aprilsched.serving import (
    AbortBody,
    BroadcastBody,
    DiskBody,
    JoinBody,
    LeaveBody,
    PauseBody,
    Refused,
    TensorBody,
    VersionBody,
    as_json,
    body_of,
    openapi_answer,
)

_LATE = (
    "An engine has not answered in time; the call goes on, and GET /server_info shows the modes."
)


async def pause(request: web.Request) -> web.Response:
    """POST /pause_generation. The mode "abort" ends every request; after the others the requests
    wait inside the engines, as the gateway's own straggler rule says."""
    service = request.app[SERVICE]
    body = await body_of(request, PauseBody)
    if body.mode == "abort":
        service.responses.abort_all()
    return await _in_time(service.pause(), "Generation paused successfully.")


async def resume(request: web.Request) -> web.Response:
    """POST /continue_generation."""
    await body_of(request, dict[str, Any])
    service = request.app[SERVICE]
    return await _in_time(service.resume(), "Generation continued successfully.")


async def _in_time(call: Awaitable[None], done: str) -> web.Response:
    try:
        await call
    except TimeoutError:
        return as_json({"message": _LATE, "status": "error"}, 504)
    except AprilschedError as error:
        return as_json({"message": str(error), "status": "error"}, 400)
    return as_json({"message": done, "status": "ok"})


async def abort(request: web.Request) -> web.Response:
    """POST /abort_request; answers 200 whether or not the request exists."""
    body = await body_of(request, AbortBody)
    responses = request.app[SERVICE].responses
    if body.abort_all:
        responses.abort_all()
    elif body.rid:
        responses.abort(body.rid)
    elif body.group:
        responses.abort_group(body.group)
    return web.Response()


async def flush(request: web.Request) -> web.Response:
    """GET or POST /flush_cache; 400 while requests run."""
    try:
        done = await request.app[SERVICE].flush()
    except (AprilschedError, TimeoutError) as error:
        return web.Response(status=400, text=f"Flush cache failed: {error}\n")
    if done:
        return web.Response(text="Cache flushed.\n")
    return web.Response(status=400, text="Flush cache failed: requests run; pause first.\n")


async def update_from_disk(request: web.Request) -> web.Response:
    """POST /update_weights_from_disk. The scheduler pauses, flushes and continues the engines where
    the client has not; `flush_cache` is ignored."""
    service = request.app[SERVICE]
    body = await body_of(request, DiskBody)
    if body.abort_all_requests:
        service.responses.abort_all()
    return await _updated(service, service.load(body.model_path, body.weight_version))


async def update_version(request: web.Request) -> web.Response:
    """POST /update_weight_version, after weights were loaded into the engines themselves."""
    service = request.app[SERVICE]
    body = await body_of(request, VersionBody)
    if body.abort_all_requests:
        service.responses.abort_all()
    answer = await _updated(
        service, service.relabel(body.new_version), new_version=body.new_version
    )
    return answer


async def _updated(
    service: Service, update: Awaitable[RefitReport], **more: object
) -> web.Response:
    try:
        report = await update
    except AprilschedError as error:
        content = {"success": False, "message": f"Failed to update weights: {error}"}
        return as_json({**content, "num_paused_requests": 0}, 400)
    # The engines that are named are out of use until a later update reaches them.
    message = f"Succeeded to update model weights.{service.not_updated(report.quarantined)}"
    return as_json({"success": True, "message": message, "num_paused_requests": 0, **more})


async def begin_update(request: web.Request) -> web.Response:
    """POST /begin_weight_update: pauses and flushes the engines where the client has not."""
    return await _done(request.app[SERVICE].begin_weights())


async def end_update(request: web.Request) -> web.Response:
    """POST /end_weight_update."""
    return await _done(request.app[SERVICE].end_weights())


async def update_from_tensor(request: web.Request) -> web.Response:
    """POST /update_weights_from_tensor: a bucket of an update for all engines."""
    service = request.app[SERVICE]
    body = await body_of(request, TensorBody)
    if body.abort_all_requests:
        service.responses.abort_all()
    given, engines = body.serialized_named_tensors, service.takers
    return await _taken(service, body, lambda: handles(given, engines, body.load_format))


async def update_from_distributed(request: web.Request) -> web.Response:
    """POST /update_weights_from_distributed: a bucket that the client broadcasts to all engines."""
    service = request.app[SERVICE]
    body = await body_of(request, BroadcastBody)
    if body.abort_all_requests:
        service.responses.abort_all()
    return await _taken(
        service,
        body,
        lambda: broadcast(_metas(body), group=body.group_name, load_format=body.load_format),
    )


def _metas(body: BroadcastBody) -> list[TensorMeta]:
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise ConfigError(
            f"There are {len(body.names)} names, {len(body.dtypes)} dtypes and "
            f"{len(body.shapes)} shapes; give one of each for every tensor."
        )
    return [
        TensorMeta(name=name, dtype=dtype.removeprefix("torch."), shape=tuple(shape))
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True)
    ]


async def _taken(
    service: Service, body: TensorBody | BroadcastBody, bucket: Callable[[], Bucket]
) -> web.Response:
    try:
        failed = await service.take_bucket(
            bucket(), label=body.weight_version, last=body.flush_cache
        )
    except AprilschedError as error:
        return as_json({"success": False, "message": f"Failed to update weights: {error}"}, 400)
    message = f"Succeeded to update model weights.{service.not_updated(failed)}"
    return as_json({"success": True, "message": message})


async def join_group(request: web.Request) -> web.Response:
    """POST /init_weights_update_group: every engine joins with its part of the ranks."""
    body = await body_of(request, JoinBody)
    group = RefitGroup(
        name=body.group_name,
        address=body.master_address,
        port=body.master_port,
        world_size=body.world_size,
        backend=body.backend,
    )
    return await _done(request.app[SERVICE].join_group(group, body.rank_offset))


async def leave_group(request: web.Request) -> web.Response:
    """POST /destroy_weights_update_group."""
    body = await body_of(request, LeaveBody)
    return await _done(request.app[SERVICE].leave_group(body.group_name))


async def _done(call: Awaitable[None]) -> web.Response:
    try:
        await call
    except AprilschedError as error:
        return as_json({"success": False, "message": str(error)}, 400)
    return as_json({"success": True, "message": "Success"})


# --- info ----------------------------------------------------------------------------------------

# The calls of the gateway that only read.

_STRING, _FLAG = {"type": "string"}, {"type": "boolean"}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "AbortReq": {"rid": _STRING, "abort_all": {**_FLAG, "default": False}},
    "PauseGenerationReqInput": {
        "mode": {**_STRING, "enum": ["abort", "retract", "in_place"], "default": "abort"}
    },
    "UpdateWeightFromDiskReqInput": {
        "model_path": _STRING,
        "weight_version": _STRING,
        "abort_all_requests": {**_FLAG, "default": False},
    },
    "UpdateWeightVersionReqInput": {
        "new_version": _STRING,
        "abort_all_requests": {**_FLAG, "default": True},
    },
}


async def health(request: web.Request) -> web.Response:
    """GET /health: 503 while no engine is in use, or while the gateway stops. It generates nothing,
    so it also answers during a pause."""
    service = request.app[SERVICE]
    return web.Response(status=200 if service.in_use and not service.draining else 503)


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 503 also while a client has paused the gateway."""
    service = request.app[SERVICE]
    takes = service.in_use and not service.draining and not service.held
    return web.Response(status=200 if takes else 503)


async def model_info(request: web.Request) -> web.Response:
    """GET /model_info."""
    service = request.app[SERVICE]
    return as_json(
        {
            "model_path": service.model_path,
            "served_model_name": service.model_path,
            "tokenizer_path": service.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": service.label,
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info: what a client of SGLang looks up, and the engines under ``gateway``.

    A group for weights needs a rank for each rank of all engines, so `tp_size` is their number.
    """
    service = request.app[SERVICE]
    running, tokens = _room(service)
    engines = [
        {"name": engine.name, "mode": service.mode_of(engine.name)}
        for engine in service.fleet.engines
    ]
    return as_json(
        {
            "model_path": service.model_path,
            "tokenizer_path": service.model_path,
            "skip_tokenizer_init": not service.texts.there,
            "incremental_streaming_output": True,
            "tp_size": Groups.ranks(service.takers) or 1,
            "pp_size": 1,
            "dp_size": 1,
            "enable_lora": False,
            "max_running_requests": running,
            "max_total_num_tokens": tokens,
            "weight_version": service.label,
            "random_seed": service.random_seed,
            "status": "ready",
            "version": _release(service),
            "gateway": {
                "aprilsched": __version__,
                "engines": engines,
                "store": service.store_state,
            },
        }
    )


async def loads(request: web.Request) -> web.Response:
    """GET /v1/loads: the requests of the gateway, as those of one server."""
    service = request.app[SERVICE]
    running, tokens = _room(service)
    rank = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": service.running(),
        "num_waiting_reqs": service.waiting(),
        "max_running_requests": running,
        "max_total_num_tokens": tokens,
    }
    return as_json(
        {"timestamp": datetime.now(UTC).isoformat(), "version": _release(service), "loads": [rank]}
    )


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    path = request.app[SERVICE].model_path
    model = {"id": path, "object": "model", "owned_by": "sglang", "root": path, "parent": None}
    return as_json({"object": "list", "data": [model]})


async def workers(request: web.Request) -> web.Response:
    """GET /workers: a program that expects SGLang's router finds the gateway as the only worker, so
    that its control calls go through the gateway too."""
    service = request.app[SERVICE]
    worker = {
        "id": "gateway",
        "url": f"{request.scheme}://{request.host}",
        "model_id": service.model_path,
        "worker_type": "regular",
        "is_healthy": bool(service.in_use),
    }
    return as_json({"workers": [worker], "total": 1})


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: the paths, and the bodies that clients look up."""
    return openapi_answer(request, "aprilsched gateway", __version__, _SCHEMAS)


def _room(service: Service) -> tuple[int, int]:
    """Running requests and tokens of KV that fit on all engines which tell it."""
    found = [engine.capabilities for engine in service.fleet.engines]
    return (
        sum(each.max_running_requests or 0 for each in found),
        sum(each.kv_tokens or 0 for each in found),
    )


_RELEASE = ("0", "5", "21")


def _release(service: Service) -> str:
    """The oldest release of SGLang among the engines, whose answers those of the gateway resemble;
    in front of other engines the newest that the gateway resembles."""
    servers = [engine.capabilities.server for engine in service.fleet.engines]
    found = [re.findall(r"\d+", name)[:3] for name in servers if "vLLM" not in name]
    return ".".join(min(found, key=lambda parts: [int(part) for part in parts], default=_RELEASE))


# --- tokenize ------------------------------------------------------------------------------------

# POST /tokenize and /detokenize, with SGLang's bodies and answers.

_LARGEST_ID = 2**31 - 1


class _TokenizeBody(msgspec.Struct, frozen=True):
    prompt: str | list[str]
    add_special_tokens: bool = True


class _DetokenizeBody(msgspec.Struct, frozen=True):
    tokens: list[int | list[int]]
    skip_special_tokens: bool = True


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: the token ids of a text, or of each of several."""
    service = request.app[SERVICE]
    body = await body_of(request, _TokenizeBody)
    one = isinstance(body.prompt, str)
    texts: Any = [body.prompt] if one else body.prompt
    ids = await service.texts.encoded(
        texts, service.context_tokens, special=body.add_special_tokens
    )
    counts = [len(each) for each in ids]
    longest = service.context_tokens
    return as_json(
        {
            "tokens": ids[0] if one else ids,
            "count": counts[0] if one else counts,
            "max_model_len": -1 if longest is None else longest,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of token ids, or of each of several lists of them."""
    service = request.app[SERVICE]
    body = await body_of(request, _DetokenizeBody)
    tokenizer = service.texts.tokenizer
    lists = [each for each in body.tokens if isinstance(each, list)]
    if lists and len(lists) < len(body.tokens):
        raise Refused("tokens has ids and lists of ids; give either.")
    several: list[Any] = lists or [body.tokens]
    if not all(0 <= i <= _LARGEST_ID for ids in several for i in ids):
        raise Refused(f"tokens must be in [0, {_LARGEST_ID}].")
    texts = await service.texts.prepared(
        lambda: [tokenizer.decode(ids, skip_special=body.skip_special_tokens) for ids in several],
        size=sum(map(len, several)),
    )
    return as_json({"text": texts if lists else texts[0]})
