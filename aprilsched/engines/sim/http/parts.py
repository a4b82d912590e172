"""The endpoints that load adapters, bracket updates, and lend memory.

SGLang's scheduler dies of memory calls in a wrong order; here they fail with 500 and change
nothing.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from aprilsched.engines.sim.http.bodies import AdapterBody, MemoryBody, decode
from aprilsched.engines.sim.http.keys import SERVED
from aprilsched.engines.sim.http.refusals import Crashed, as_json
from aprilsched.engines.sim.memory import TAGS
from aprilsched.errors import EngineRejected

__all__ = ["begin_update", "end_update", "load_adapter", "release", "unload_adapter", "wake"]


async def load_adapter(request: web.Request) -> web.Response:
    """POST /load_lora_adapter; what runs goes on."""
    served = request.app[SERVED]
    body = decode(await request.read(), AdapterBody)
    return _adapters(await served.load_adapter(body.lora_name, body.lora_path), served.adapters)


async def unload_adapter(request: web.Request) -> web.Response:
    """POST /unload_lora_adapter; answers when the adapter's last request has ended."""
    served = request.app[SERVED]
    body = decode(await request.read(), AdapterBody)
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
    body = decode(await request.read(), MemoryBody)
    try:
        await request.app[SERVED].engine.release(body.tags or TAGS)
    except EngineRejected as error:
        raise Crashed from error
    return as_json(None)


async def wake(request: web.Request) -> web.Response:
    """POST /resume_memory_occupation."""
    body = decode(await request.read(), MemoryBody)
    try:
        await request.app[SERVED].engine.wake(body.tags or TAGS)
    except EngineRejected as error:
        raise Crashed from error
    return as_json(None)


async def begin_update(request: web.Request) -> web.Response:
    """POST /begin_weight_update; refused while one is open."""
    decode(await request.read(), dict[str, Any])
    done = request.app[SERVED].begin_update()
    return _session(done, "an update is open already; end it first")


async def end_update(request: web.Request) -> web.Response:
    """POST /end_weight_update; refused unless one is open."""
    decode(await request.read(), dict[str, Any])
    done = request.app[SERVED].end_update()
    return _session(done, "no update is open; begin one first")


def _session(done: bool, why_not: str) -> web.Response:
    content = {"success": done, "message": "Success" if done else why_not}
    return as_json(content, 200 if done else 400)
