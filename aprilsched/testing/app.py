"""The modelled routes of SGLang's HTTP API, and which of them need the admin key."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aprilsched.serving.bodies import BODIES, Bodies, expect_later
from aprilsched.serving.keys import asking_for
from aprilsched.serving.refusals import refusing
from aprilsched.testing import control_handlers, info
from aprilsched.testing.generate import generate
from aprilsched.testing.served import SERVED, ServedEngine

__all__ = ["make_app"]

_LARGEST_BODY = 2**28

_OPEN: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/generate", generate),
    ("GET", "/model_info", info.model_info),
    ("GET", "/get_model_info", info.model_info),
    ("GET", "/server_info", info.server_info),
    ("GET", "/get_server_info", info.server_info),
    ("GET", "/openapi.json", info.openapi),
    ("GET", "/v1/loads", info.loads),
    ("GET", "/v1/models", info.models),
    ("GET", "/ready", info.ready),
    ("GET", "/health", info.health),
    ("GET", "/health_generate", info.health),
)
_ADMIN: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/pause_generation", control_handlers.pause),
    ("POST", "/continue_generation", control_handlers.resume),
    ("POST", "/abort_request", control_handlers.abort),
    ("GET", "/flush_cache", control_handlers.flush),
    ("POST", "/flush_cache", control_handlers.flush),
    ("POST", "/update_weights_from_disk", control_handlers.update_from_disk),
    ("POST", "/update_weight_version", control_handlers.update_version),
    ("POST", "/begin_weight_update", control_handlers.begin_update),
    ("POST", "/end_weight_update", control_handlers.end_update),
    ("POST", "/update_weights_from_tensor", control_handlers.update_from_tensor),
    ("POST", "/update_weights_from_distributed", control_handlers.update_from_distributed),
    ("POST", "/init_weights_update_group", control_handlers.join_group),
    ("POST", "/destroy_weights_update_group", control_handlers.leave_group),
    ("POST", "/load_lora_adapter", control_handlers.load_adapter),
    ("POST", "/unload_lora_adapter", control_handlers.unload_adapter),
    ("POST", "/release_memory_occupation", control_handlers.release),
    ("POST", "/resume_memory_occupation", control_handlers.wake),
)


def make_app(
    served: ServedEngine, *, admin_key: str | None, outermost: Sequence[Middleware] = ()
) -> web.Application:
    """The web application of `served`; the `outermost` middlewares see all calls and answers."""
    keys = asking_for(api_key=None, admin_key=admin_key, control={path for _, path, _ in _ADMIN})
    app = web.Application(middlewares=[*outermost, keys, refusing])
    app[BODIES] = Bodies(largest=_LARGEST_BODY, together=2 * _LARGEST_BODY)
    app[SERVED] = served
    for method, path, handler in (*_OPEN, *_ADMIN):
        app.router.add_route(method, path, handler, expect_handler=expect_later)
    return app
