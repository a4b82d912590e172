"""The calls that both backends share, with SGLang's names, defaults and answers.

The gateway and the test server (:mod:`aprilsched.testing`) are the two backends. ``/generate`` and
the calls that only one of them has are separate routes. Unknown fields of a body are ignored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aprilsched.agents.serving.bodies import BODIES, Bodies, body_of, expect_later
from aprilsched.agents.serving.keys import key_middleware
from aprilsched.agents.serving.refusals import Malformed, answer_refusals, as_json
from aprilsched.agents.serving.streams import Event
from aprilsched.errors import AprilschedError

T = TypeVar("T")
PauseMode: TypeAlias = Literal["abort", "retract", "in_place"]


class PauseBody(msgspec.Struct, frozen=True):
    """Body of POST /pause_generation; SGLang's default ends every request."""

    mode: PauseMode = "abort"


class ContinueBody(msgspec.Struct, frozen=True):
    """Body of POST /continue_generation, which is required, even if it is empty."""

    torch_empty_cache: bool = True


class AbortBody(msgspec.Struct, frozen=True):
    """POST /abort_request; only the gateway supports `group`."""

    rid: str | None = None
    abort_all: bool = False
    group: str | None = None


class _LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    """The common fields of every call that loads weights."""

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class DiskBody(_LoadBody, frozen=True, kw_only=True):
    """POST /update_weights_from_disk."""

    model_path: str


class TensorBody(_LoadBody, frozen=True, kw_only=True):
    """POST /update_weights_from_tensor: one handle or pickled bucket per rank, as base64. They are
    passed on without being opened."""

    serialized_named_tensors: list[str]
    load_format: str | None = None


class BroadcastBody(_LoadBody, frozen=True, kw_only=True):
    """POST /update_weights_from_distributed: the tensors that the ranks of a group receive next."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None


class JoinBody(msgspec.Struct, frozen=True):
    """POST /init_weights_update_group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class LeaveBody(msgspec.Struct, frozen=True):
    """POST /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class VersionBody(msgspec.Struct, frozen=True):
    """Body of POST /update_weight_version; SGLang's default ends every request."""

    new_version: str
    abort_all_requests: bool = True


Update = TypeVar("Update", DiskBody, VersionBody, TensorBody, BroadcastBody)

_LATE = (
    "An engine has not answered in time; the call continues, and GET /server_info shows the modes."
)
_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_NOT_FLUSHED = "Flush cache failed.\n"
_FLUSH_AGAIN_S = 0.05
_SCHEMAS: Mapping[str, type[msgspec.Struct]] = {
    "AbortReq": AbortBody,
    "ContinueGenerationReqInput": ContinueBody,
    "PauseGenerationReqInput": PauseBody,
    "UpdateWeightFromDiskReqInput": DiskBody,
    "UpdateWeightVersionReqInput": VersionBody,
}
"""SGLang's names of the bodies whose fields and defaults clients look up."""


class Backend(Protocol):
    """Answers the read-only calls: one engine, or a scheduler in front of several."""

    @property
    def model_path(self) -> str:
        """The folder of the model."""
        ...

    @property
    def generate_body(self) -> type[msgspec.Struct]:
        """The body of POST /generate."""
        ...

    @property
    def label(self) -> str:
        """The label of the weights."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a request would generate now."""
        ...

    async def alive(self) -> bool:
        """Return whether the process can do its work, now or later."""
        ...

    async def healthy(self) -> bool:
        """Return whether anything generates."""
        ...

    def model_facts(self) -> Event:
        """The fields of /model_info beyond the model and its weights."""
        ...

    def server_facts(self) -> Event:
        """The fields of /server_info beyond the model and its weights, such as ``version``."""
        ...

    def rank_loads(self) -> list[Event]:
        """Return the figures of /v1/loads, of each data-parallel rank."""
        ...


class Control(Protocol):
    """The calls that change a server.

    A call that fails raises an :class:`~aprilsched.errors.AprilschedError`. Updates return the
    names of the engines that they have not reached, joined by commas.
    """

    async def carry_out(self, call: Coroutine[Any, Any, T]) -> T:
        """Run one of the calls below, except for aborts."""
        ...

    async def abort(self, rid: str) -> None: ...
    async def abort_group(self, name: str) -> None: ...
    async def abort_all(self) -> None: ...
    @property
    def idle(self) -> list[str]:
        """Names of the engines that a pause leaves running, because they have no requests."""
        ...

    def pause(self, mode: PauseMode) -> Coroutine[Any, Any, None]: ...
    async def resume(self) -> None: ...
    async def flush(self) -> bool:
        """Drop the cached KV; return False while it is in use."""
        ...

    async def load(self, body: DiskBody) -> str: ...
    async def relabel(self, label: str) -> str: ...
    async def begin_update(self) -> None: ...
    async def end_update(self) -> None: ...
    async def take_tensors(self, body: TensorBody) -> str: ...
    async def take_broadcast(self, body: BroadcastBody) -> str: ...
    async def join_group(self, body: JoinBody) -> None: ...
    async def leave_group(self, name: str) -> None: ...


BACKEND: web.AppKey[Backend] = web.AppKey("backend", Backend)
"""The application key of the backend."""
CONTROLS: web.AppKey[Control] = web.AppKey("control", Control)
"""The application key of the control calls."""

Route: TypeAlias = tuple[str, str, Handler]


async def _pause(request: web.Request) -> web.Response:
    body = await body_of(request, PauseBody)
    control = request.app[CONTROLS]
    answer = await _answer_steering(request, control.pause(body.mode), "paused")
    if answer.status == web.HTTPOk.status_code and (idle := ", ".join(control.idle)):
        note = f"Idle servers get no requests, and are not paused themselves: {idle}."
        return as_json({"message": f"Generation paused. {note}", "status": "ok"})
    return answer


async def _resume(request: web.Request) -> web.Response:
    await body_of(request, ContinueBody)
    return await _answer_steering(request, request.app[CONTROLS].resume(), "continued")


async def _answer_steering(
    request: web.Request, call: Coroutine[Any, Any, None], done: str
) -> web.Response:
    try:
        await request.app[CONTROLS].carry_out(call)
    except TimeoutError:
        return as_json({"message": _LATE, "status": "error"}, 504)
    except AprilschedError as error:
        return as_json({"message": str(error), "status": "error"}, 400)
    return as_json({"message": f"Generation {done} successfully.", "status": "ok"})


async def _abort(request: web.Request) -> web.Response:
    """POST /abort_request; answers 200 whether or not the request exists."""
    body, control = await body_of(request, AbortBody), request.app[CONTROLS]
    if body.abort_all:
        await control.abort_all()
    elif body.rid:
        await control.abort(body.rid)
    elif body.group:
        await control.abort_group(body.group)
    return web.Response()


async def _flush(request: web.Request) -> web.Response:
    """GET or POST /flush_cache; 400 if the cache is still in use after the timeout."""
    control = request.app[CONTROLS]
    try:
        seconds = float(request.query.get("timeout", "0"))
    except ValueError as error:
        raise Malformed("timeout: Input should be a valid number") from error
    if not 0 <= seconds < float("inf"):
        raise Malformed("timeout: Input should be greater than or equal to 0")
    clock = asyncio.get_running_loop()
    until = clock.time() + seconds
    try:
        while True:
            done = await control.carry_out(control.flush())
            if done or clock.time() >= until:
                break
            await asyncio.sleep(_FLUSH_AGAIN_S)
    except (AprilschedError, TimeoutError) as error:
        return web.Response(status=400, text=f"{_NOT_FLUSHED}{error}\n")
    return web.Response(status=200 if done else 400, text=_FLUSHED if done else _NOT_FLUSHED)


async def _update_from_disk(request: web.Request) -> web.Response:
    body = await _update_of(request, DiskBody)
    done = "Succeeded to update model weights."
    if body.weight_version is not None:
        done += f" Weight version updated to {body.weight_version}."
    call = request.app[CONTROLS].load(body)
    return await _answer_update(request, call, done, num_paused_requests=0)


async def _update_version(request: web.Request) -> web.Response:
    label = (await _update_of(request, VersionBody)).new_version
    call = request.app[CONTROLS].relabel(label)
    done = f"Weight version updated to {label}"
    return await _answer_update(request, call, done, new_version=label)


async def _update_from_tensor(request: web.Request) -> web.Response:
    body = await _update_of(request, TensorBody)
    return await _answer_update(request, request.app[CONTROLS].take_tensors(body))


async def _update_from_distributed(request: web.Request) -> web.Response:
    body = await _update_of(request, BroadcastBody)
    return await _answer_update(request, request.app[CONTROLS].take_broadcast(body))


async def _update_of(request: web.Request, kind: type[Update]) -> Update:
    """Return the body of an update; aborts all requests first if the body requires it."""
    body = await body_of(request, kind)
    if body.abort_all_requests:
        await request.app[CONTROLS].abort_all()
    return body


async def _answer_update(
    request: web.Request,
    call: Coroutine[Any, Any, str],
    done: str = "Succeeded to update model weights.",
    **more: object,
) -> web.Response:
    try:
        missed = await request.app[CONTROLS].carry_out(call)
    except AprilschedError as error:
        content = {"success": False, "message": f"Failed to update weights: {error}"}
        return as_json({**content, **more}, 400)
    if missed:
        more["not_updated"] = missed.split(", ")
        done += f" Not updated, and out of use: {missed}."
    return as_json({"success": True, "message": done, **more})


async def _begin_update(request: web.Request) -> web.Response:
    await body_of(request, dict[str, Any])
    return await _answer_call(request, request.app[CONTROLS].begin_update())


async def _end_update(request: web.Request) -> web.Response:
    await body_of(request, dict[str, Any])
    return await _answer_call(request, request.app[CONTROLS].end_update())


async def _join_group(request: web.Request) -> web.Response:
    body = await body_of(request, JoinBody)
    return await _answer_call(request, request.app[CONTROLS].join_group(body))


async def _leave_group(request: web.Request) -> web.Response:
    body = await body_of(request, LeaveBody)
    return await _answer_call(request, request.app[CONTROLS].leave_group(body.group_name))


async def _answer_call(request: web.Request, call: Coroutine[Any, Any, None]) -> web.Response:
    try:
        await request.app[CONTROLS].carry_out(call)
    except AprilschedError as error:
        return as_json({"success": False, "message": str(error)}, 400)
    return as_json({"success": True, "message": "Success"})


async def _alive(request: web.Request) -> web.Response:
    return web.Response(status=200 if await request.app[BACKEND].alive() else 503)


async def _health(request: web.Request) -> web.Response:
    return web.Response(status=200 if await request.app[BACKEND].healthy() else 503)


async def _ready(request: web.Request) -> web.Response:
    return web.Response(status=200 if request.app[BACKEND].ready else 503)


async def _model_info(request: web.Request) -> web.Response:
    backend = request.app[BACKEND]
    fields = {
        "model_path": backend.model_path,
        "served_model_name": backend.model_path,
        "tokenizer_path": backend.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": backend.label,
    }
    return as_json({**fields, **backend.model_facts()})


async def _server_info(request: web.Request) -> web.Response:
    backend = request.app[BACKEND]
    fields = {
        "model_path": backend.model_path,
        "tokenizer_path": backend.model_path,
        "incremental_streaming_output": True,
        "pp_size": 1,
        "dp_size": 1,
        "weight_version": backend.label,
        "status": "ready" if backend.ready else "unavailable",
    }
    return as_json({**fields, **backend.server_facts()})


async def _loads(request: web.Request) -> web.Response:
    """GET /v1/loads: the part that SGLang calls core, for every request."""
    backend = request.app[BACKEND]
    fields = {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": backend.server_facts()["version"],
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [{"dp_rank": rank, **load} for rank, load in enumerate(backend.rank_loads())],
    }
    return as_json(fields)


async def _models(request: web.Request) -> web.Response:
    backend = request.app[BACKEND]
    path = backend.model_path
    name = backend.model_facts().get("served_model_name", path)
    model = {"id": name, "object": "model", "owned_by": "sglang", "root": path, "parent": None}
    return as_json({"object": "list", "data": [{**model, "created": int(time.time())}]})


async def _openapi(request: web.Request) -> web.Response:
    """GET /openapi.json: the paths of the application, and the bodies that clients look up."""
    paths: dict[str, Event] = {}
    for route in request.app.router.routes():
        if route.resource is not None:
            paths.setdefault(route.resource.canonical, {})[route.method.lower()] = {}
    bodies = {**_SCHEMAS, "GenerateReqInput": request.app[BACKEND].generate_body}
    _, known = msgspec.json.schema_components(bodies.values())
    return as_json(
        {
            "openapi": "3.1.0",
            "info": {"title": "FastAPI", "version": "0.1.0"},
            "paths": paths,
            "components": {"schemas": {n: known[kind.__name__] for n, kind in bodies.items()}},
        }
    )


_FREE: Sequence[Route] = (
    ("GET", "/health", _alive),
    ("GET", "/health_generate", _health),
    ("GET", "/ready", _ready),
)
_INFO: Sequence[Route] = (
    ("GET", "/model_info", _model_info),
    ("GET", "/get_model_info", _model_info),
    ("GET", "/server_info", _server_info),
    ("GET", "/get_server_info", _server_info),
    ("GET", "/openapi.json", _openapi),
    ("GET", "/v1/loads", _loads),
    ("GET", "/v1/models", _models),
)
_CONTROL: Sequence[Route] = (
    ("POST", "/pause_generation", _pause),
    ("POST", "/continue_generation", _resume),
    ("POST", "/abort_request", _abort),
    ("GET", "/flush_cache", _flush),
    ("POST", "/flush_cache", _flush),
    ("POST", "/update_weights_from_disk", _update_from_disk),
    ("POST", "/update_weight_version", _update_version),
    ("POST", "/begin_weight_update", _begin_update),
    ("POST", "/end_weight_update", _end_update),
    ("POST", "/update_weights_from_tensor", _update_from_tensor),
    ("POST", "/update_weights_from_distributed", _update_from_distributed),
    ("POST", "/init_weights_update_group", _join_group),
    ("POST", "/destroy_weights_update_group", _leave_group),
)
FREE = tuple(path for _, path, _ in _FREE)
"""Paths of the probes, which need no key."""
INFO = tuple(path for _, path, _ in (*_INFO, *_FREE))
"""Paths of the read-only calls."""
CONTROL = tuple(dict.fromkeys(path for _, path, _ in _CONTROL))
"""Paths of the calls that change the server."""


def make_app(
    backend: Backend,
    controls: Control,
    bodies: Bodies,
    *,
    requests: Sequence[Route],
    control: Sequence[Route] = (),
    api_key: str | None = None,
    admin_key: str | None = None,
    outermost: Sequence[Middleware] = (),
) -> web.Application:
    """Return the web application of a backend.

    Args:
        backend: answers the read-only calls.
        controls: changes the backend.
        bodies: reads the bodies of requests.
        requests: routes that only this backend has.
        control: the paths among them that change it.
        api_key: bearer token for all calls except health checks; None requires none.
        admin_key: bearer token for control calls, also valid for the others; None requires
            `api_key` there too.
        outermost: middlewares that see all calls and answers.
    """
    keys = key_middleware(
        api_key=api_key,
        admin_key=admin_key,
        control={path for _, path, _ in (*_CONTROL, *control)},
        free=FREE,
    )
    app = web.Application(middlewares=[*outermost, answer_refusals, keys])
    app[BODIES] = bodies
    app[BACKEND] = backend
    app[CONTROLS] = controls
    for method, path, handler in (*_FREE, *_INFO, *_CONTROL, *requests, *control):
        app.router.add_route(method, path, handler, expect_handler=expect_later)
    return app
