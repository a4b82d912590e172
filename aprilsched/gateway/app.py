"""The routes of the gateway, and which of them need which key."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler

from aprilsched.gateway import control, generate, info, openai, tokenize
from aprilsched.gateway.service import SERVICE, Service
from aprilsched.serving.bodies import BODIES, Bodies, expect_later
from aprilsched.serving.keys import asking_for
from aprilsched.serving.refusals import refusing

__all__ = ["make_app"]

_LARGEST_BODY = 2**26
"""Bytes of a request: a prompt of a million token ids needs a tenth of them."""
_ALL_BODIES = 2**28
"""Bytes of all requests that are read at a time."""

_FREE: Sequence[tuple[str, str, Handler]] = (
    ("GET", "/health", info.health),
    ("GET", "/health_generate", info.health),
    ("GET", "/ready", info.ready),
)
_OPEN: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/generate", generate.generate),
    ("POST", "/tokenize", tokenize.tokenize),
    ("POST", "/v1/tokenize", tokenize.tokenize),
    ("POST", "/detokenize", tokenize.detokenize),
    ("POST", "/v1/detokenize", tokenize.detokenize),
    ("POST", "/v1/completions", openai.completions),
    ("POST", "/v1/chat/completions", openai.chat_completions),
    ("GET", "/model_info", info.model_info),
    ("GET", "/get_model_info", info.model_info),
    ("GET", "/server_info", info.server_info),
    ("GET", "/get_server_info", info.server_info),
    ("GET", "/v1/loads", info.loads),
    ("GET", "/v1/models", info.models),
    ("GET", "/workers", info.workers),
    ("GET", "/openapi.json", info.openapi),
)
_ADMIN: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/pause_generation", control.pause),
    ("POST", "/continue_generation", control.resume),
    ("POST", "/abort_request", control.abort),
    ("GET", "/flush_cache", control.flush),
    ("POST", "/flush_cache", control.flush),
    ("POST", "/update_weights_from_disk", control.update_from_disk),
    ("POST", "/update_weight_version", control.update_version),
    ("POST", "/begin_weight_update", control.begin_update),
    ("POST", "/end_weight_update", control.end_update),
    ("POST", "/update_weights_from_tensor", control.update_from_tensor),
    ("POST", "/update_weights_from_distributed", control.update_from_distributed),
    ("POST", "/init_weights_update_group", control.join_group),
    ("POST", "/destroy_weights_update_group", control.leave_group),
)


def make_app(service: Service, *, api_key: str | None, admin_key: str | None) -> web.Application:
    """The web application of a gateway.

    Args:
        service: what the handlers ask.
        api_key: bearer token for all calls but those for health; None asks for none.
        admin_key: bearer token for control calls, which is also good for the others; None asks for
            `api_key` there too.
    """
    keys = asking_for(
        api_key=api_key,
        admin_key=admin_key,
        control={path for _, path, _ in _ADMIN},
        free={path for _, path, _ in _FREE},
    )
    app = web.Application(middlewares=[keys, refusing])
    app[BODIES] = Bodies(largest=_LARGEST_BODY, together=_ALL_BODIES)
    app[SERVICE] = service
    for method, path, handler in (*_FREE, *_OPEN, *_ADMIN):
        app.router.add_route(method, path, handler, expect_handler=expect_later)
    return app
