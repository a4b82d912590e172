"""The middleware around all others in which the faults happen to the calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aprilsched.errors import EngineError
from aprilsched.testing.faults.answers import after, instead
from aprilsched.testing.faults.broken import Broken, reset
from aprilsched.testing.faults.choosing import Faults, Met
from aprilsched.testing.faults.engine_faults import EngineFaults
from aprilsched.testing.faults.kinds import Die, EngineWide, Fault
from aprilsched.testing.faults.stream_faults import Items, spoiled

__all__ = ["spoil", "spoiling"]


@dataclass(frozen=True, slots=True)
class _Call:
    """The faults that a call has met on its arrival, and the source of those of its stream."""

    mets: Sequence[Met[Fault]]
    faults: Faults


_CALL: web.RequestKey[_Call] = web.RequestKey("call", _Call)


def spoiling(faults: Faults, engine: EngineFaults) -> Middleware:
    """The middleware that lets the faults of a script happen to the calls that they are for."""

    @web.middleware
    async def spoiling(request: web.Request, handler: Handler) -> web.StreamResponse:
        mets = faults.meet(request.path)
        try:
            await _start_engine_faults(mets, engine)
            await engine.wait_while_hanging()
            if (answer := await instead(mets)) is not None:
                return answer
            request[_CALL] = _Call(mets, faults)
            return await after(mets, request, await handler(request))
        except (Broken, EngineError, ConnectionResetError):
            # The script demands it, the engine died under the call, or the client is gone.
            reset(request.transport)
            return await _gone()

    return spoiling


def spoil(request: web.Request, items: Items) -> Items:
    """The items of a stream, changed by the faults that happen to it."""
    call = request.get(_CALL)
    if call is None:
        return items
    return spoiled([*call.mets, *call.faults.meet(request.path, in_stream=True)], items)


async def _start_engine_faults(mets: Sequence[Met[Fault]], engine: EngineFaults) -> None:
    for met in mets:
        if isinstance(met.fault, EngineWide):
            started = engine.start(cast("Met[EngineWide]", met))
            if started and isinstance(met.fault, Die):
                await _gone()


async def _gone() -> web.StreamResponse:
    """Wait for the cancellation of the handler, which follows the loss of its connection."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets the event")
