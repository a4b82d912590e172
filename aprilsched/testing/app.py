"""The web application of the test server, with its calls for LoRA adapters and for memory."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from aprilsched.agents.serving.bodies import Bodies, body_of
from aprilsched.agents.serving.calls import make_app
from aprilsched.agents.serving.refusals import Crashed, as_json
from aprilsched.errors import AprilschedError, EngineRejected
from aprilsched.simulation.engine.sim_engine import TAGS
from aprilsched.testing.generate import generate
from aprilsched.testing.served import SERVED, ServedEngine


class _AdapterBody(msgspec.Struct, frozen=True):
    """Body of POST /load_lora_adapter and /unload_lora_adapter; unloading needs no path."""

    lora_name: str
    lora_path: str = ""


class _MemoryBody(msgspec.Struct, frozen=True):
    """Body of POST /release_memory_occupation and /resume_memory_occupation.

    Without `tags` the call applies to all parts.
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
    """Return the web application; the `outermost` middlewares see all calls and responses."""
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
