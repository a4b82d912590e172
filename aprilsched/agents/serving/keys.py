"""Checks bearer tokens: one key for requests and one for control calls, as in SGLang."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aprilsched.agents.serving.refusals import Unauthorized
from aprilsched.errors import ConfigError


def key_middleware(
    *,
    api_key: str | None,
    admin_key: str | None,
    control: Collection[str],
    free: Collection[str] = (),
) -> Middleware:
    """Return a middleware that refuses calls without the required key.

    It runs inside of :func:`answer_refusals`.

    Args:
        api_key: bearer token for all calls but the `free` ones; None requires none.
        admin_key: bearer token for `control` calls, also valid for the others; None requires
            `api_key` there too.
        control: paths of the calls that change the server.
        free: paths of the calls that need no key.

    Raises:
        ConfigError: if a key cannot be sent in a header, such as one that ends with a newline.
    """
    named = {"api_key": api_key, "admin_key": admin_key}
    keys = [_bearer(name, key) for name, key in named.items() if key is not None]
    admin = keys if admin_key is None else keys[-1:]

    @web.middleware
    async def ask(request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = admin if request.path in control else keys if api_key is not None else []
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        good = not wanted or any(hmac.compare_digest(given, key) for key in wanted)
        if not good and request.path not in free:
            key = "admin key" if wanted is admin and admin_key is not None else "API key"
            raise Unauthorized(f"The {key} is missing or wrong; send it as a bearer token.")
        return await handler(request)

    return ask


def _bearer(name: str, key: str) -> bytes:
    if not re.fullmatch("[!-~]+", key):
        raise ConfigError(f"`{name}` must be printable ASCII without blanks; strip its line end.")
    return f"Bearer {key}".encode()
