"""The control calls of the gateway, with SGLang's bodies, defaults and answers."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from aiohttp import web

from aprilsched.coordinator.refits import RefitReport
from aprilsched.errors import AprilschedError, EngineError
from aprilsched.gateway.service import SERVICE
from aprilsched.serving.bodies import AbortBody, DiskBody, PauseBody, VersionBody, decode
from aprilsched.serving.refusals import as_json

__all__ = [
    "abort",
    "flush",
    "not_through_here",
    "pause",
    "resume",
    "update_from_disk",
    "update_version",
]

_LATE = (
    "An engine has not answered in time; the call goes on, and GET /server_info shows the modes."
)


async def pause(request: web.Request) -> web.Response:
    """POST /pause_generation. The mode "abort" ends every request; after the others the requests
    wait inside the engines, as the gateway's own straggler rule says."""
    service = request.app[SERVICE]
    body = decode(await request.read(), PauseBody)
    if body.mode == "abort":
        service.responses.abort_all()
    return await _in_time(service.pause(), "Generation paused successfully.")


async def resume(request: web.Request) -> web.Response:
    """POST /continue_generation."""
    decode(await request.read(), dict[str, Any])
    service = request.app[SERVICE]
    return await _in_time(service.resume(), "Generation continued successfully.")


async def _in_time(call: Awaitable[None], done: str) -> web.Response:
    try:
        await call
    except TimeoutError:
        return as_json({"message": _LATE, "status": "error"}, 504)
    return as_json({"message": done, "status": "ok"})


async def abort(request: web.Request) -> web.Response:
    """POST /abort_request; answers 200 whether or not the request exists."""
    body = decode(await request.read(), AbortBody)
    responses = request.app[SERVICE].responses
    if body.abort_all:
        responses.abort_all()
    elif body.rid:
        responses.abort(body.rid)
    return web.Response()


async def flush(request: web.Request) -> web.Response:
    """GET or POST /flush_cache; 400 while requests run."""
    try:
        done = await request.app[SERVICE].flush()
    except (EngineError, TimeoutError) as error:
        return web.Response(status=400, text=f"Flush cache failed: {error}\n")
    if done:
        return web.Response(text="Cache flushed.\n")
    return web.Response(status=400, text="Flush cache failed: requests run; pause first.\n")


async def update_from_disk(request: web.Request) -> web.Response:
    """POST /update_weights_from_disk. The scheduler pauses, flushes and continues the engines where
    the client has not; `flush_cache` is ignored."""
    service = request.app[SERVICE]
    body = decode(await request.read(), DiskBody)
    if body.abort_all_requests:
        service.responses.abort_all()
    return await _updated(service.load(body.model_path, body.weight_version))


async def update_version(request: web.Request) -> web.Response:
    """POST /update_weight_version, after weights were loaded into the engines themselves."""
    service = request.app[SERVICE]
    body = decode(await request.read(), VersionBody)
    if body.abort_all_requests:
        service.responses.abort_all()
    answer = await _updated(service.relabel(body.new_version), new_version=body.new_version)
    return answer


async def _updated(update: Awaitable[RefitReport], **more: object) -> web.Response:
    try:
        report = await update
    except AprilschedError as error:
        content = {"success": False, "message": f"Failed to update weights: {error}"}
        return as_json({**content, "num_paused_requests": 0}, 400)
    message = "Succeeded to update model weights."
    if report.quarantined:
        # These engines are out of use until a later update reaches them.
        message += f" Not updated, and out of use: {', '.join(sorted(report.quarantined))}."
    return as_json({"success": True, "message": message, "num_paused_requests": 0, **more})


async def not_through_here(request: web.Request) -> web.Response:
    """A call whose tensors or ranks belong to one engine, so that nobody can pass it on to all."""
    message = (
        f"{request.path} is for a single engine; pause the gateway, load the weights into each "
        "engine itself, and give the gateway their label with /update_weight_version."
    )
    return as_json({"success": False, "message": message}, 501)
