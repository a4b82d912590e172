"""The handlers of the calls that only read."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from aprilsched.serving import answers
from aprilsched.serving.refusals import as_json
from aprilsched.testing.generate import one_token
from aprilsched.testing.served import SERVED

__all__ = ["health", "loads", "model_info", "models", "openapi", "ready", "server_info"]

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
    return answers.openapi(request, "FastAPI", "0.1.0", _SCHEMAS)
