"""The routes of the gateway, and which of them need which key."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aprilsched.gateway import control, generate, info
from aprilsched.gateway.state import GATEWAY
from aprilsched.testing.refusals import as_json, refusing

if TYPE_CHECKING:
    from aprilsched.gateway.server import Gateway

__all__ = ["make_app"]

_LARGEST_BODY = 2**26
"""Bytes of a request: a prompt of a million token ids needs a tenth of them."""

_FREE: Sequence[tuple[str, str, Handler]] = (
    ("GET", "/health", info.health),
    ("GET", "/health_generate", info.health),
    ("GET", "/ready", info.ready),
)
_OPEN: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/generate", generate.generate),
    ("GET", "/model_info", info.model_info),
    ("GET", "/get_model_info", info.model_info),
    ("GET", "/server_info", info.server_info),
    ("GET", "/get_server_info", info.server_info),
    ("GET", "/v1/loads", info.loads),
    ("GET", "/v1/models", info.models),
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
    ("POST", "/update_weights_from_tensor", control.not_through_here),
    ("POST", "/update_weights_from_distributed", control.not_through_here),
    ("POST", "/init_weights_update_group", control.not_through_here),
)


def make_app(gateway: Gateway, *, api_key: str | None, admin_key: str | None) -> web.Application:
    """The web application of a gateway.

    Args:
        gateway: what the handlers ask.
        api_key: bearer token for all calls but those for health; None asks for none.
        admin_key: bearer token for control calls, which is also good for the others; None asks for
            `api_key` there too.
    """
    app = web.Application(
        middlewares=[_asking_for(api_key, admin_key), refusing], client_max_size=_LARGEST_BODY
    )
    app[GATEWAY] = gateway
    for method, path, handler in (*_FREE, *_OPEN, *_ADMIN):
        app.router.add_route(method, path, handler)
    return app


def _asking_for(api_key: str | None, admin_key: str | None) -> Middleware:
    """A middleware that answers 401 to a call without the key that it needs."""
    free = {path for _, path, _ in _FREE}
    closed = {path for _, path, _ in _ADMIN}
    keys = [_bearer(key) for key in (api_key, admin_key) if key is not None]
    admin = keys if admin_key is None else [_bearer(admin_key)]

    @web.middleware
    async def ask(request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = admin if request.path in closed else keys if api_key is not None else []
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        good = not wanted or any(hmac.compare_digest(given, key) for key in wanted)
        if not good and request.path not in free:
            return as_json({"error": "Unauthorized"}, 401)
        return await handler(request)

    return ask


def _bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()
