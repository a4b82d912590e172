"""Asks for bearer tokens: one key for requests and one for control calls, as SGLang has them."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aprilsched.serving.refusals import as_json

__all__ = ["asking_for"]


def asking_for(
    *,
    api_key: str | None,
    admin_key: str | None,
    control: Collection[str],
    free: Collection[str] = (),
) -> Middleware:
    """A middleware that answers 401 to a call without the key that it needs.

    Args:
        api_key: bearer token for all calls but the `free` ones; None asks for none.
        admin_key: bearer token for `control` calls, which is also good for the others; None asks
            for `api_key` there too.
        control: paths of the calls that change the server.
        free: paths of the calls that need no key.
    """
    keys = [_bearer(key) for key in (api_key, admin_key) if key is not None]
    admin = keys if admin_key is None else [_bearer(admin_key)]

    @web.middleware
    async def ask(request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = admin if request.path in control else keys if api_key is not None else []
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        good = not wanted or any(hmac.compare_digest(given, key) for key in wanted)
        if not good and request.path not in free:
            return as_json({"error": "Unauthorized"}, 401)
        return await handler(request)

    return ask


def _bearer(key: str) -> bytes:
    return f"Bearer {key}".encode()
