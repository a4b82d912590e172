"""The calls of the gateway that only read."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aprilsched import __version__
from aprilsched.gateway.state import GATEWAY
from aprilsched.testing.refusals import as_json

if TYPE_CHECKING:
    from aprilsched.gateway.server import Gateway

__all__ = ["health", "loads", "model_info", "models", "openapi", "ready", "server_info"]

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
    gateway = request.app[GATEWAY]
    return web.Response(status=200 if gateway.in_use and not gateway.draining else 503)


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 503 also while a client has paused the gateway."""
    gateway = request.app[GATEWAY]
    takes = gateway.in_use and not gateway.draining and not gateway.held
    return web.Response(status=200 if takes else 503)


async def model_info(request: web.Request) -> web.Response:
    """GET /model_info."""
    gateway = request.app[GATEWAY]
    return as_json(
        {
            "model_path": gateway.model_path,
            "served_model_name": gateway.model_path,
            "tokenizer_path": gateway.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": gateway.label,
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """GET /server_info: what a client of SGLang looks up, and the engines under ``gateway``."""
    gateway = request.app[GATEWAY]
    running, tokens = _room(gateway)
    modes = gateway.modes()
    engines = [
        {"name": engine.name, "mode": modes.get(engine.name, "out of use")}
        for engine in gateway.fleet.engines
    ]
    return as_json(
        {
            "model_path": gateway.model_path,
            "tokenizer_path": gateway.model_path,
            "skip_tokenizer_init": True,
            "incremental_streaming_output": True,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "enable_lora": False,
            "max_running_requests": running,
            "max_total_num_tokens": tokens,
            "weight_version": gateway.label,
            "random_seed": gateway.random_seed,
            "status": "ready",
            "version": _release(gateway),
            "gateway": {"aprilsched": __version__, "engines": engines},
        }
    )


async def loads(request: web.Request) -> web.Response:
    """GET /v1/loads: the requests of the gateway, as those of one server."""
    gateway = request.app[GATEWAY]
    running, tokens = _room(gateway)
    rank = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": gateway.running(),
        "num_waiting_reqs": gateway.waiting(),
        "max_running_requests": running,
        "max_total_num_tokens": tokens,
    }
    return as_json(
        {"timestamp": datetime.now(UTC).isoformat(), "version": _release(gateway), "loads": [rank]}
    )


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    path = request.app[GATEWAY].model_path
    model = {"id": path, "object": "model", "owned_by": "sglang", "root": path, "parent": None}
    return as_json({"object": "list", "data": [model]})


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: the paths, and the bodies that clients look up."""
    paths: dict[str, dict[str, Any]] = {}
    for route in request.app.router.routes():
        if route.resource is not None:
            paths.setdefault(route.resource.canonical, {})[route.method.lower()] = {}
    schemas = {name: {"properties": fields, "type": "object"} for name, fields in _SCHEMAS.items()}
    return as_json(
        {
            "openapi": "3.1.0",
            "info": {"title": "aprilsched gateway", "version": __version__},
            "paths": paths,
            "components": {"schemas": schemas},
        }
    )


def _room(gateway: Gateway) -> tuple[int, int]:
    """Running requests and tokens of KV that fit on all engines which tell it."""
    found = [engine.capabilities for engine in gateway.fleet.engines]
    return (
        sum(each.max_running_requests or 0 for each in found),
        sum(each.kv_tokens or 0 for each in found),
    )


def _release(gateway: Gateway) -> str:
    """The oldest release among the engines, whose answers those of the gateway resemble."""
    found = [re.findall(r"\d+", engine.capabilities.server)[:3] for engine in gateway.fleet.engines]
    return ".".join(min(found, key=lambda parts: [int(part) for part in parts]))
