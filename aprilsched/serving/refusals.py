"""The ways in which SGLang refuses a call: three forms of error, answered in one place.

::

    Refusal
    ├── Malformed   400, {"object": "error", …}: the body has not the form that is expected
    ├── Refused     400, {"error": {"message"}}, or an event of that kind in a stream
    ├── Unavailable 503, the same content: it may be asked for again later
    └── Crashed     500, plain text: an error that SGLang does not catch itself
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

__all__ = ["Crashed", "Malformed", "Refusal", "Refused", "Unavailable", "as_json", "refusing"]


class Refusal(Exception):
    """A call that is refused."""

    def answer(self) -> web.Response:
        """The answer that the client gets."""
        raise NotImplementedError


class Malformed(Refusal):
    """The body does not have the form that the endpoint expects."""

    def answer(self) -> web.Response:
        content = {
            "object": "error",
            "message": f"1 validation error:\n  {self}",
            "type": "Bad Request",
            "param": None,
            "code": 400,
        }
        return as_json(content, 400)


class Refused(Refusal):
    """The body is well-formed, but its content is refused."""

    def answer(self) -> web.Response:
        return as_json({"error": {"message": str(self)}}, 400)

    def event(self) -> dict[str, Any]:
        """The same error as an event of a stream, whose status is 200 already."""
        kind = "invalid_request_error"
        return {
            "error": {"message": str(self), "type": kind, "code": 400, "retryable": False},
        }


class Unavailable(Refusal):
    """The call cannot be taken now."""

    def answer(self) -> web.Response:
        return as_json({"error": {"message": str(self)}}, 503)


class Crashed(Refusal):
    """SGLang's handler fails with an error that it does not catch."""

    def answer(self) -> web.Response:
        return web.Response(status=500, text="Internal Server Error")


def as_json(content: object, status: int = 200) -> web.Response:
    """A JSON answer with `content`."""
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")


@web.middleware
async def refusing(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn refusals into answers; unknown paths are answered as FastAPI does."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return refusal.answer()
    except web.HTTPException as error:
        if error.status in (404, 405):
            detail = "Not Found" if error.status == 404 else "Method Not Allowed"
            return as_json({"detail": detail}, error.status)
        raise
