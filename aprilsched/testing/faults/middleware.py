"""The middleware around all others in which the faults happen to the calls."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aprilsched.engines.sim.sim_engine import SimEngine
from aprilsched.errors import EngineError
from aprilsched.serving import as_json
from aprilsched.testing.faults.script import (
    Broken,
    Delay,
    Die,
    EngineWide,
    Fault,
    Faults,
    FloodAnswer,
    Garbage,
    Hang,
    IgnoredAbort,
    Met,
    RefitFails,
    Reset,
    Silence,
    Slow,
    SlowLoris,
    Status,
    StuckVersion,
    Truncate,
    reset,
    wait,
)
from aprilsched.testing.faults.stream_faults import Items, dribbled, flood, spoiled

# Carries out the faults of whole answers: before the call is carried out, and after.
#
# Before the call, a fault may wait, break the connection, or answer instead of the server. After
# the call, it replaces the answer or drops it. Streamed answers have begun by then and are not
# changed.

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


# --- engine faults -------------------------------------------------------------------------------

# Carries out the faults of the whole engine: it hangs, decodes slowly, dies or restarts.
#
# Invariants:
#
# - Overlapping faults add up: the engine decodes at the product of the factors, and calls wait
#   until the last hang has ended.
# - A new process neither hangs nor is slow.


class Server(Protocol):
    """The part of a server that faults act on."""

    @property
    def engine(self) -> SimEngine: ...

    async def crash(self) -> None:
        """Fail like a killed process."""
        ...

    async def restart(self, *, keeps_weights: bool) -> None:
        """Start again as a new process."""
        ...


class EngineFaults:
    """Carries out the faults of one server, from :meth:`begin` to :meth:`end`."""

    def __init__(self, faults: Faults, server: Server) -> None:
        self._faults = faults
        self._server = server
        self._rates: list[float] = []
        self._spells: set[asyncio.Task[None]] = set()
        self._lives: set[asyncio.Task[None]] = set()
        self._dead = False
        self._awake = asyncio.Event()
        self._awake.set()

    def begin(self) -> None:
        """Schedule the faults that happen at a time and not at a call."""
        for met in self._faults.by_the_clock():
            _keep(self._lives, self._at(met))

    async def end(self) -> None:
        """Cancel all faults."""
        tasks = [*self._spells, *self._lives]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_while_hanging(self) -> None:
        """Wait while the engine hangs."""
        await self._awake.wait()

    def start(self, met: Met[EngineWide]) -> bool:
        """Start a fault now; False if the engine is dead or the fault is used up."""
        if self._dead or not met.fire():
            return False
        match met.fault:
            case Die() as fault:
                self._dead = True
                _keep(self._lives, self._die(fault))
            case Hang() as fault:
                _keep(self._spells, self._slow(0.0, fault.seconds))
            case Slow() as fault:
                _keep(self._spells, self._slow(fault.factor, fault.seconds))
            case _:
                raise AssertionError(met.fault)
        return True

    async def _at(self, met: Met[EngineWide]) -> None:
        await wait(met.fault.at)
        self.start(met)

    async def _slow(self, rate: float, seconds: float) -> None:
        with self._decoding_at(rate):
            await wait(seconds)

    async def _die(self, fault: Die) -> None:
        for task in self._spells:
            task.cancel()
        await self._server.crash()
        await wait(fault.seconds)
        await self._server.restart(keeps_weights=fault.keeps_weights)
        self._dead = False

    @contextmanager
    def _decoding_at(self, rate: float) -> Generator[None, None, None]:
        self._rates.append(rate)
        self._apply()
        try:
            yield
        finally:
            self._rates.remove(rate)
            self._apply()

    def _apply(self) -> None:
        rate = math.prod(self._rates)
        self._server.engine.decode_at(rate)
        if rate:
            self._awake.set()
        else:
            self._awake.clear()


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


# --- middleware ----------------------------------------------------------------------------------


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
