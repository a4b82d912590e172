"""Errors in OpenAI's form, which its clients turn into exceptions of their own.

Whatever a handler refuses, in SGLang's form or by a setting that cannot work, is answered so.
"""

from __future__ import annotations

import functools
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from aprilsched.errors import ConfigError
from aprilsched.serving.refusals import Refusal, as_json

__all__ = ["error_content", "in_openai_form"]

_TYPES = {400: "invalid_request_error", 413: "invalid_request_error", 503: "overloaded_error"}


def error_content(message: str, status: int) -> dict[str, Any]:
    """The content of an error, as an answer or as an event of a stream."""
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def in_openai_form(handler: Handler) -> Handler:
    """`handler`, with what it refuses answered in OpenAI's form."""

    @functools.wraps(handler)
    async def handled(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refusal as refusal:
            status, message = refusal.answer().status, str(refusal)
        except ConfigError as error:
            status, message = 400, str(error)
        except web.HTTPRequestEntityTooLarge as error:
            status, message = error.status, error.text or error.reason
        return as_json(error_content(message, status), status)

    return handled
