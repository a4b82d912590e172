"""Carries out the faults of whole answers: before the call is carried out, and after.

Before the call, a fault may wait, break the connection, or answer instead of the server. After the
call, it replaces the answer or drops it. Streamed answers have begun by then and are not changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, TypeAlias

from aiohttp import web

from aprilsched.serving.refusals import as_json
from aprilsched.testing.faults.broken import Broken, wait
from aprilsched.testing.faults.choosing import Met
from aprilsched.testing.faults.kinds import (
    Delay,
    Fault,
    FloodAnswer,
    Garbage,
    IgnoredAbort,
    RefitFails,
    Reset,
    Silence,
    SlowLoris,
    Status,
    StuckVersion,
    Truncate,
)
from aprilsched.testing.faults.stream_faults import dribbled, flood

__all__ = ["after", "instead"]

Before: TypeAlias = Callable[[Met[Any]], Awaitable[web.Response | None]]
After: TypeAlias = Callable[
    [Met[Any], web.Request, web.Response], Awaitable[web.Response | web.StreamResponse]
]


async def instead(mets: Iterable[Met[Fault]]) -> web.Response | None:
    """Return the answer that replaces the call; None if the call must be carried out.

    Raises:
        Broken: if the connection must be reset.
    """
    for met in mets:
        before = _BEFORE.get(type(met.fault))
        if before is not None and (answer := await before(met)) is not None:
            return answer
    return None


async def after(
    mets: Iterable[Met[Fault]], request: web.Request, answer: web.StreamResponse
) -> web.StreamResponse:
    """Return the answer that replaces the server's own `answer`.

    Raises:
        Broken: if the connection must be reset.
    """
    for met in mets:
        change = _AFTER.get(type(met.fault))
        if change is not None and isinstance(answer, web.Response):
            answer = await change(met, request, answer)
    return answer


# -- before -------------------------------------------------------------------------------------


async def _late(met: Met[Delay]) -> None:
    if not met.fault.every_event and met.fire():
        await wait(met.fault.seconds)


async def _silent(met: Met[Silence]) -> None:
    if not met.fault.carried_out and met.fire():
        await wait(met.fault.seconds)


async def _reset(met: Met[Reset]) -> None:
    if met.fault.after_tokens is None and not met.fault.carried_out and met.fire():
        raise Broken


async def _failed(met: Met[Status]) -> web.Response | None:
    return None if met.fault.carried_out or not met.fire() else _error(met.fault)


async def _refused(met: Met[RefitFails]) -> web.Response | None:
    why = met.fault.message
    content = {"success": False, "message": why, "error_message": why}
    return as_json(content, met.fault.status) if met.fire() else None


async def _pretended(met: Met[StuckVersion]) -> web.Response | None:
    content = {"success": True, "message": "Succeeded to update model weights."}
    return as_json(content) if met.fire() else None


async def _ignored(met: Met[IgnoredAbort]) -> web.Response | None:
    return web.Response() if met.fire() else None


# -- after --------------------------------------------------------------------------------------


async def _silent_then(met: Met[Silence], _: web.Request, answer: web.Response) -> web.Response:
    if met.fault.carried_out and met.fire():
        await wait(met.fault.seconds)
    return answer


async def _reset_then(met: Met[Reset], _: web.Request, answer: web.Response) -> web.Response:
    if met.fault.carried_out and met.fire():
        raise Broken
    return answer


async def _failed_then(met: Met[Status], _: web.Request, answer: web.Response) -> web.Response:
    return _error(met.fault) if met.fault.carried_out and met.fire() else answer


async def _truncated(met: Met[Truncate], _: web.Request, answer: web.Response) -> web.Response:
    body = _body(answer)
    return _with(answer, body[: len(body) // 2]) if met.fire() else answer


async def _garbage(met: Met[Garbage], _: web.Request, answer: web.Response) -> web.Response:
    return _with(answer, met.random_bytes(met.fault.bytes)) if met.fire() else answer


async def _slow_loris(
    met: Met[SlowLoris], request: web.Request, answer: web.Response
) -> web.StreamResponse:
    body = _body(answer)
    if not body or not met.fire():
        return answer
    response = web.StreamResponse(status=answer.status)
    response.content_type, response.content_length = answer.content_type, len(body)
    await response.prepare(request)
    async with aclosing(dribbled(met.fault, body)) as pieces:
        async for piece in pieces:
            await response.write(piece)
    return response


async def _flooded(
    met: Met[FloodAnswer], request: web.Request, answer: web.Response
) -> web.StreamResponse:
    if not met.fire():
        return answer
    response = web.StreamResponse(status=answer.status)
    response.content_type = answer.content_type
    await response.prepare(request)
    for piece in flood(b"[", b"1,", met.fault.bytes):
        await response.write(piece)
    return response


def _error(fault: Status) -> web.Response:
    if fault.body is not None:
        return web.Response(status=fault.status, text=fault.body)
    return as_json({"error": {"message": fault.message}}, fault.status)


def _with(answer: web.Response, body: bytes) -> web.Response:
    return web.Response(body=body, status=answer.status, content_type=answer.content_type)


def _body(answer: web.Response) -> bytes:
    return answer.body if isinstance(answer.body, bytes) else b""


_BEFORE: Mapping[type[Fault], Before] = {
    Delay: _late,
    Silence: _silent,
    Reset: _reset,
    Status: _failed,
    RefitFails: _refused,
    StuckVersion: _pretended,
    IgnoredAbort: _ignored,
}
_AFTER: Mapping[type[Fault], After] = {
    Silence: _silent_then,
    Reset: _reset_then,
    Status: _failed_then,
    Truncate: _truncated,
    Garbage: _garbage,
    SlowLoris: _slow_loris,
    FloodAnswer: _flooded,
}
