"""The control calls of the gateway, with SGLang's bodies, defaults and answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from aprilsched.coordinator.refits import RefitReport
from aprilsched.engines.refit import RefitGroup, TensorMeta
from aprilsched.errors import AprilschedError, ConfigError
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.gateway.updates import Bucket, broadcast, handles
from aprilsched.serving.bodies import (
    AbortBody,
    BroadcastBody,
    DiskBody,
    JoinBody,
    LeaveBody,
    PauseBody,
    TensorBody,
    VersionBody,
    body_of,
)
from aprilsched.serving.refusals import as_json

__all__ = [
    "abort",
    "begin_update",
    "end_update",
    "flush",
    "join_group",
    "leave_group",
    "pause",
    "resume",
    "update_from_disk",
    "update_from_distributed",
    "update_from_tensor",
    "update_version",
]

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
