"""Carries the faults of a script out: on whole answers, on streams and on the engine."""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aprilsched.engines.sim.sim_engine import SimEngine
from aprilsched.errors import EngineError
from aprilsched.serving.streams import Item, frame_item
from aprilsched.testing.faults.kinds import (
    Broken,
    Die,
    EngineWide,
    Hang,
    Met,
    Slow,
    Steps,
    wait,
)
from aprilsched.testing.faults.script import Faults

Items: TypeAlias = AsyncGenerator[Item, None]

_NO_LINGER = struct.pack("ii", 1, 0)


def reset(transport: asyncio.BaseTransport | None) -> None:
    """Close with a TCP RST: the peer sees a broken connection, and no end of the stream."""
    if not isinstance(transport, asyncio.WriteTransport):
        return
    held: socket.socket | None = transport.get_extra_info("socket")
    if held is not None and held.fileno() >= 0:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


# --- answers and streams -------------------------------------------------------------------------


async def _replace_answer(
    met: Met, request: web.Request, own: web.Response | None
) -> web.StreamResponse | None:
    """What is answered instead of the server's `own` answer, or of carrying the call out.

    Raises:
        Broken: if the connection must be reset.
    """
    body = own.body if own is not None and isinstance(own.body, bytes) else b""
    told = met.fault.answer(met, body)
    if told is None or not met.fire():
        return own
    if isinstance(told, Broken):
        raise told
    if isinstance(told, web.Response):
        return told
    if isinstance(told, int | float):
        await wait(told)
        return own
    own = own or web.Response()
    if isinstance(told, bytes):
        return web.Response(body=told, status=own.status, content_type=own.content_type)
    response = web.StreamResponse(status=own.status)
    response.content_type = own.content_type
    await response.prepare(request)
    async with aclosing(_carry_out(told)) as pieces:
        async for piece in pieces:
            await response.write(frame_item(piece))
    return response


async def _spoil_stream(met: Met, items: Items) -> Items:
    """The items of a stream to which the fault happens."""
    fault, sent, happens, over = met.fault, 0, False, False
    async for item in items:
        steps: Steps | None = fault.again(item) if happens else None
        if not over and isinstance(item, dict):
            if sent >= fault.tokens_before:
                steps = fault.instead(met, item)
            happens = over = steps is not None and met.fire()
            sent += len(item.get("output_ids", ()))
        if not happens or steps is None:
            yield item
            continue
        async with aclosing(_carry_out(steps, items)) as pieces:
            async for piece in pieces:
                yield piece
        if fault.ends:
            return


async def _carry_out(steps: Steps, items: Items | None = None) -> Items:
    """The items that `steps` send, in their time; `items` has what follows in the stream."""
    for step in steps:
        if isinstance(step, Broken):
            raise step
        if isinstance(step, int | float):
            await wait(step)
        elif step is not None:
            yield step
        elif items is not None and (following := await anext(items, None)) is not None:
            yield following


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

    def start(self, met: Met) -> bool:
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

    async def _at(self, met: Met) -> None:
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

    mets: Sequence[Met]
    faults: Faults


_CALL: web.RequestKey[_Call] = web.RequestKey("call", _Call)


def fault_middleware(faults: Faults, engine: EngineFaults) -> Middleware:
    """The middleware that lets the faults of a script happen to the calls that they are for."""

    @web.middleware
    async def fault_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        mets = faults.meet(request.path)
        try:
            await _start_engine_faults(mets, engine)
            await engine.wait_while_hanging()
            for met in mets:
                told = None if met.fault.late else await _replace_answer(met, request, None)
                if told is not None:
                    return told
            request[_CALL] = _Call(mets, faults)
            answer = await handler(request)
            for met in mets:
                # A streamed answer has begun by now and is not changed.
                if met.fault.late and isinstance(answer, web.Response):
                    answer = await _replace_answer(met, request, answer) or answer
            return answer
        except (Broken, EngineError, ConnectionResetError):
            # The script demands it, the engine died under the call, or the client is gone.
            reset(request.transport)
            return await _gone()

    return fault_middleware


async def spoil(request: web.Request, items: Items) -> Items:
    """The items of a stream, changed by the faults that happen to it, one after the other."""
    async with AsyncExitStack() as stack:
        if (call := request.get(_CALL)) is not None:
            for met in (*call.mets, *call.faults.meet(request.path, in_stream=True)):
                items = await stack.enter_async_context(aclosing(_spoil_stream(met, items)))
        async for item in items:
            yield item


async def _start_engine_faults(mets: Sequence[Met], engine: EngineFaults) -> None:
    for met in mets:
        if isinstance(met.fault, EngineWide):
            started = engine.start(met)
            if started and isinstance(met.fault, Die):
                await _gone()


async def _gone() -> web.StreamResponse:
    """Wait for the cancellation of the handler, which follows the loss of its connection."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets the event")
