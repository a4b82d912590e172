"""Translates failed or refused HTTP calls into this package's own errors."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, cast

import aiohttp
import msgspec
from yarl import URL

from aprilsched.errors import (
    EngineBusy,
    EngineError,
    EngineProtocolError,
    EngineRejected,
    EngineUnreachable,
)
from aprilsched.kernel.engines.sockets import ENDLESS

_MESSAGE_LIMIT = 300
"""Number of characters of a server's own message that an error keeps."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions of decoding JSON; RecursionError comes from thousands of nested brackets."""

_DECIMAL = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)
_RETRY_AFTER_LENGTH = 64
"""Number of characters of a Retry-After header; a date has 29."""

_MESSAGE_BYTES = 2**14
"""Number of bytes of an error's body that are searched for its message."""


class ConnectionDropped(EngineError):
    """The connection broke after the request was sent, so the request may have been executed."""


class Answer(NamedTuple):
    """The status and body of a call, and its consequence for later calls."""

    status: int
    body: bytes
    retry_after_s: float | None = None


def engine_error(name: str, url: URL, error: Exception) -> EngineError:
    """Return this package's error for a failure of aiohttp."""
    match error:
        case aiohttp.ClientConnectorError() | aiohttp.ConnectionTimeoutError():
            why = error.strerror or "timed out"
            return EngineUnreachable(name, f"cannot connect ({why}); is the server up at {url}?")
        case aiohttp.ClientResponseError():
            _forget_keys(error)
            return EngineProtocolError(
                name, f"does not speak HTTP ({quote(error.message)}); is {url} right?"
            )
        case _ if ENDLESS in str(error):
            return EngineProtocolError(name, f"was disconnected because {ENDLESS}; is {url} right?")
        case _:
            return ConnectionDropped(
                name, f"the connection broke ({type(error).__name__}: {quote(str(error))})."
            )


def _forget_keys(error: aiohttp.ClientResponseError) -> None:
    """Remove the request's headers from aiohttp's error, which is shown as the cause of ours."""
    nothing: Any = error.request_info.headers.copy()
    nothing.clear()
    error.request_info = error.request_info._replace(headers=nothing)
    error.args = (error.request_info, error.history)


def rejection(name: str, what: str, answer: Answer) -> EngineRejected:
    """The error of this package for an HTTP error status, with the server's own message."""
    message = quote(_message(answer.body))
    hint = ""
    if answer.status in (401, 403):
        hint = (
            "; give the server's --admin-api-key as admin_key, or its --api-key as api_key (to a "
            "command as --admin-key-env and --api-key-env, to the gateway's as "
            "--engine-admin-key-env and --engine-api-key-env)"
        )
    return refusal(
        name,
        f"{what} answered {answer.status} ({message or 'no message'}){hint}.",
        status=answer.status,
        retry_after_s=answer.retry_after_s,
    )


BUSY_STATUSES = frozenset({408, 429, 503})
"""Statuses of a server, or of a router before it, that has no room for a request now. SGLang sends
503 to a full queue, to a request that waited too long in it and to one that it preempted (0.5.23),
vLLM 503 to a full queue and while it scales (0.32), and SGLang's router 429 and 408 (0.3.2)."""


def refusal(
    name: str, message: str, *, status: int, retry_after_s: float | None = None
) -> EngineRejected:
    """The error of this package for an error status of an answer or of an event."""
    if status in BUSY_STATUSES:
        return EngineBusy(name, message, status=status, retry_after_s=retry_after_s)
    return EngineRejected(name, message, status=status)


def retry_after_s(header: str | None) -> float | None:
    """The seconds in a Retry-After header: a number or a date. None if it has neither."""
    if header is None or len(header) > _RETRY_AFTER_LENGTH:
        return None
    with suppress(ValueError, OverflowError):
        if _DECIMAL.fullmatch(header.strip()):
            return float(header)
        when = parsedate_to_datetime(header)
        return max(0.0, when.timestamp() - time.time())
    return None


def _message(body: bytes) -> str:
    try:
        found: Any = msgspec.json.decode(body[:_MESSAGE_BYTES])
        for name in ("error", "message", "detail"):
            if isinstance(found, dict):
                found = cast("dict[str, Any]", found).get(name, found)
        return str(found)
    except UNREADABLE:
        return body[:_MESSAGE_BYTES].decode("utf-8", "replace")


def quote(text: str) -> str:
    """The server's words in a form that an error can hold: one line, printable, not too long."""
    words = " ".join(text[: 4 * _MESSAGE_LIMIT].split())
    return "".join(c if c.isprintable() else "?" for c in words[:_MESSAGE_LIMIT])
