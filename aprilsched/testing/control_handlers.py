"""The handlers of the control calls, with SGLang's defaults."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from aprilsched.engines.sim.resources import TAGS
from aprilsched.errors import EngineRejected
from aprilsched.serving.bodies import (
    AbortBody,
    AdapterBody,
    BroadcastBody,
    DiskBody,
    JoinBody,
    LeaveBody,
    MemoryBody,
    PauseBody,
    TensorBody,
    VersionBody,
    body_of,
)
from aprilsched.serving.refusals import Crashed, Malformed, as_json
from aprilsched.testing.served import SERVED

__all__ = [
    "abort",
    "begin_update",
    "end_update",
    "flush",
    "join_group",
    "leave_group",
    "load_adapter",
    "pause",
    "release",
    "resume",
    "unload_adapter",
    "update_from_disk",
    "update_from_distributed",
    "update_from_tensor",
    "update_version",
    "wake",
]

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
