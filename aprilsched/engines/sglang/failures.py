"""What a failed or refused HTTP call means, in this package's own errors."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import aiohttp
import msgspec
from yarl import URL

from aprilsched.engines.sglang.wire import MESSAGE_LIMIT
from aprilsched.errors import (
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
)

__all__ = ["Answer", "ConnectionDropped", "engine_error", "rejection"]


class ConnectionDropped(EngineError):
    """The connection broke after the request was sent: it may have been carried out."""


class Answer(NamedTuple):
    """The status and body of a control call."""

    status: int
    body: bytes


def engine_error(name: str, url: URL, error: Exception) -> EngineError:
    """The error of ours that a failure of aiohttp means."""
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            why = error.strerror or "timed out"
            return EngineUnreachable(name, f"cannot connect ({why}); is the server up at {url}?")
        case aiohttp.ClientResponseError():
            return EngineProtocolError(
                name, f"does not speak HTTP ({error.message[:MESSAGE_LIMIT]}); is {url} right?"
            )
        case _:
            return ConnectionDropped(
                name, f"the connection broke ({type(error).__name__}: {error})."
            )


def rejection(name: str, what: str, answer: Answer) -> EngineRejected:
    """The error of ours that an HTTP error status means, with the server's own message."""
    message = _message(answer.body)[:MESSAGE_LIMIT]
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
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[: 4 * MESSAGE_LIMIT].decode("utf-8", "replace").strip()
    for name in ("error", "message", "detail"):
        if isinstance(found, dict):
            found = cast("dict[str, Any]", found).get(name, found)
    return str(found)
