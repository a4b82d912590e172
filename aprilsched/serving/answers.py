"""Parts of answers in SGLang's form: server-sent events, fields of ``meta_info``, and openapi.json.

The items of a stream are events, and bytes that are not an event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from aiohttp import web

from aprilsched.serving.refusals import as_json

__all__ = [
    "DONE",
    "STREAM_HEADERS",
    "Event",
    "Item",
    "finish_reason",
    "framed",
    "openapi",
    "token_logprobs",
]

Event: TypeAlias = dict[str, Any]
Item: TypeAlias = Event | bytes

DONE = b"data: [DONE]\n\n"
"""The end of every stream."""

STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


def framed(item: Item) -> bytes:
    """The bytes of `item` on the wire."""
    return item if isinstance(item, bytes) else b"data: " + msgspec.json.encode(item) + b"\n\n"


def finish_reason(reason: str | None, *, tokens: int, last: int) -> dict[str, Any] | None:
    """The field ``finish_reason`` of a response that has `tokens` tokens, of which `last` is the
    last; None while it goes on."""
    match reason:
        case None:
            return None
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case "stop":
            return {"type": "stop", "matched": last}
        case _:
            return {"type": reason, "length": tokens}


def token_logprobs(ids: Sequence[int], logprobs: Sequence[float]) -> list[tuple[float, int, None]]:
    """The field ``output_token_logprobs``: for each token its logprob, its id, and no text."""
    return [(p, i, None) for p, i in zip(logprobs, ids, strict=True)]


def openapi(
    request: web.Request, title: str, version: str, schemas: Mapping[str, dict[str, Any]]
) -> web.Response:
    """The answer of /openapi.json: the paths of the application, and the fields of the bodies in
    `schemas`, which clients look up."""
    paths: dict[str, dict[str, Any]] = {}
    for route in request.app.router.routes():
        if route.resource is not None:
            paths.setdefault(route.resource.canonical, {})[route.method.lower()] = {}
    known = {name: {"properties": fields, "type": "object"} for name, fields in schemas.items()}
    return as_json(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": version},
            "paths": paths,
            "components": {"schemas": known},
        }
    )
