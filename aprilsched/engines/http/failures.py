"""Translates failed or refused HTTP calls into this package's own errors."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import aiohttp
import msgspec
from yarl import URL

from aprilsched.engines.http.sockets import ENDLESS
from aprilsched.errors import (
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
)

_MESSAGE_LIMIT = 300
"""Number of characters of a server's own message that an error keeps."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of decoding JSON; RecursionError comes from thousands of nested brackets."""

_MESSAGE_BYTES = 2**14
"""Number of bytes of an error's body that are searched for its message."""


class ConnectionDropped(EngineError):
    """The connection broke after the request was sent, so the request may have been executed."""


class Answer(NamedTuple):
    """The status and body of a control call."""

    status: int
    body: bytes


def engine_error(name: str, url: URL, error: Exception) -> EngineError:
    """The error of this package that stands for a failure of aiohttp."""
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            why = error.strerror or "timed out"
            return EngineUnreachable(name, f"cannot connect ({why}); is the server up at {url}?")
        case aiohttp.ClientResponseError():
            _forget_keys(error)
            return EngineProtocolError(
                name, f"does not speak HTTP ({quoted(error.message)}); is {url} right?"
            )
        case _ if ENDLESS in str(error):
            return EngineProtocolError(name, f"was disconnected because {ENDLESS}; is {url} right?")
        case _:
            return ConnectionDropped(
                name, f"the connection broke ({type(error).__name__}: {quoted(str(error))})."
            )


def _forget_keys(error: aiohttp.ClientResponseError) -> None:
    """Remove the request's headers from aiohttp's error, which is shown as the cause of ours."""
    nothing: Any = error.request_info.headers.copy()
    nothing.clear()
    error.request_info = error.request_info._replace(headers=nothing)
    error.args = (error.request_info, error.history)


def rejection(name: str, what: str, answer: Answer) -> EngineRejected:
    """The error of this package for an HTTP error status, with the server's own message."""
    message = quoted(_message(answer.body))
    hint = ""
    if answer.status in (401, 403):
        hint = "; give the server's --admin-api-key as admin_key, or its --api-key as api_key"
    return EngineRejected(
        name,
        f"{what} answered {answer.status} ({message or 'no message'}){hint}.",
        status=answer.status,
    )


def _message(body: bytes) -> str:
    try:
        found: Any = msgspec.json.decode(body[:_MESSAGE_BYTES])
        for name in ("error", "message", "detail"):
            if isinstance(found, dict):
                found = cast("dict[str, Any]", found).get(name, found)
        return str(found)
    except UNREADABLE:
        return body[:_MESSAGE_BYTES].decode("utf-8", "replace")


def quoted(text: str) -> str:
    """The server's words in a form that an error can hold: one line, printable, not too long."""
    words = " ".join(text[: 4 * _MESSAGE_LIMIT].split())
    return "".join(c if c.isprintable() else "?" for c in words[:_MESSAGE_LIMIT])
