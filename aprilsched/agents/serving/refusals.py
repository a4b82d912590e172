"""The ways in which a call is refused, and their answers.

Below /v1/ an answer has OpenAI's form, which its clients turn into their exceptions, and
elsewhere SGLang's::

    Refusal
    ├── Malformed    400, {"object": "error", …}: the body has an unexpected form
    ├── Refused      400, {"error": {"message"}}
    ├── Unavailable  503, the same content: the client may retry later
    ├── Unauthorized 401, {"error": "Unauthorized"} with a "message" that names the kind of key
    └── Crashed      500, plain text: an error that SGLang does not catch itself
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from aprilsched.errors import ConfigError

log = logging.getLogger("aprilsched")


class Refusal(Exception):
    """A call that is refused."""

    status = 400

    def answer(self) -> web.Response:
        """Return the answer that the client gets."""
        return as_json({"error": {"message": str(self)}}, self.status)


class Malformed(Refusal):
    """The body does not have the form that the endpoint expects."""

    def answer(self) -> web.Response:
        content = {
            "object": "error",
            "message": f"1 validation error:\n  {self}",
            "type": "Bad Request",
            "param": None,
            "code": self.status,
        }
        return as_json(content, self.status)


class Refused(Refusal):
    """The body is well-formed, but its content is refused."""


class Unavailable(Refusal):
    """The call cannot be accepted now."""

    status = 503


class Unauthorized(Refusal):
    """The key is missing or wrong."""

    status = 401

    def answer(self) -> web.Response:
        return as_json({"error": "Unauthorized", "message": str(self)}, self.status)


class Crashed(Refusal):
    """SGLang's handler fails with an error that it does not catch."""

    status = 500

    def answer(self) -> web.Response:
        return web.Response(status=self.status, text="Internal Server Error")


def error_event(message: str, status: int) -> dict[str, Any]:
    """Return one response's error as an event of a stream, whose status is already 200."""
    kind = "invalid_request_error" if status == Refused.status else "internal_error"
    retryable = status >= Crashed.status
    return {"error": {"message": message, "type": kind, "code": status, "retryable": retryable}}


def as_json(content: object, status: int = 200) -> web.Response:
    """Return a JSON answer with `content`."""
    body = msgspec.json.encode(content)
    return web.Response(body=body, status=status, content_type="application/json")


def error_content(message: str, status: int) -> dict[str, Any]:
    """Return the content of an error in OpenAI's form, as an answer or as an event of a stream."""
    kind = "overloaded_error" if status == Unavailable.status else "server_error"
    kind = "invalid_request_error" if status < Crashed.status else kind
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


@web.middleware
async def answer_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a request whose handler raises: in OpenAI's form below /v1/, in SGLang's elsewhere."""
    try:
        return await handler(request)
    except Refusal as refusal:
        status, message, answer = refusal.status, str(refusal), refusal.answer()
    except ConfigError as error:
        status, message, answer = Refused.status, str(error), Refused(str(error)).answer()
    except web.HTTPException as error:
        status, message = error.status, error.text or error.reason
        unknown = status in (404, 405)
        answer = as_json(
            {"detail": error.reason} if unknown else {"error": {"message": message}}, status
        )
    except Exception:
        if request.writer.output_size:
            raise  # The status of a stream is already sent once it has started.
        # The raw path may contain what must not be logged.
        route = request.match_info.route.resource
        name = "" if route is None else route.canonical
        log.exception("the call %s %s failed", request.method, name)
        status, message, answer = Crashed.status, "Internal server error.", Crashed().answer()
    is_openai = request.path.startswith("/v1/")
    return as_json(error_content(message, status), status) if is_openai else answer
