"""The calls of the gateway that only read."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from aprilsched import __version__
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.gateway.updates import Groups
from aprilsched.serving import answers
from aprilsched.serving.refusals import as_json

__all__ = ["health", "loads", "model_info", "models", "openapi", "ready", "server_info", "workers"]

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
    return answers.openapi(request, "aprilsched gateway", __version__, _SCHEMAS)


def _room(service: Service) -> tuple[int, int]:
    """Running requests and tokens of KV that fit on all engines which tell it."""
    found = [engine.capabilities for engine in service.fleet.engines]
    return (
        sum(each.max_running_requests or 0 for each in found),
        sum(each.kv_tokens or 0 for each in found),
    )


def _release(service: Service) -> str:
    """The oldest release among the engines, whose answers those of the gateway resemble."""
    found = [re.findall(r"\d+", engine.capabilities.server)[:3] for engine in service.fleet.engines]
    return ".".join(min(found, key=lambda parts: [int(part) for part in parts]))
