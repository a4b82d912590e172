"""Where the faults meet the calls: one middleware around all others."""

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
from aprilsched.testing.faults.engine import EngineFaults
from aprilsched.testing.faults.kinds import Die, EngineWide, Fault
from aprilsched.testing.faults.stream import Items, spoiled

__all__ = ["spoil", "spoiling"]


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call has met on its arrival, and where those of its stream are."""

    mets: Sequence[Met[Fault]]
    faults: Faults


_CALL: web.RequestKey[_Call] = web.RequestKey("call", _Call)


def spoiling(faults: Faults, engine: EngineFaults) -> Middleware:
    """Lets the faults of a script happen to the calls that they are for."""

    @web.middleware
    async def spoiling(request: web.Request, handler: Handler) -> web.StreamResponse:
        mets = faults.meet(request.path)
        try:
            await _strike(mets, engine)
            await engine.answering()
            if (answer := await instead(mets)) is not None:
                return answer
            request[_CALL] = _Call(mets, faults)
            return await after(mets, request, await handler(request))
        except (Broken, EngineError, ConnectionResetError):
            # The script says so, the engine died under the call, or the client is gone.
            reset(request.transport)
            return await _gone()

    return spoiling


def spoil(request: web.Request, items: Items) -> Items:
    """The items of a stream after what happens to them."""
    call = request.get(_CALL)
    if call is None:
        return items
    return spoiled([*call.mets, *call.faults.meet(request.path, in_stream=True)], items)


async def _strike(mets: Sequence[Met[Fault]], engine: EngineFaults) -> None:
    for met in mets:
        if isinstance(met.fault, EngineWide):
            struck = engine.strike(cast("Met[EngineWide]", met))
            if struck and isinstance(met.fault, Die):
                await _gone()


async def _gone() -> web.StreamResponse:
    """The handler is cancelled when its connection is lost, which the loop does next."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets the event")
