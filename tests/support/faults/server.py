"""A simulated server to which faults happen: to answers, to streams and to the whole engine.

Faults of the engine that overlap add up: it decodes at the product of the rates, and calls wait
until the last hang has ended. A new process neither hangs nor is slow.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from aprilsched.errors import EngineError
from aprilsched.simulation.engine.settings import SimConfig
from aprilsched.testing import SimServer
from aprilsched.testing.generate import STREAM_FILTER
from aprilsched.testing.server import reset
from tests.support.faults.kinds import Broken, EngineWide, Fault, Hang, Items, Met, Restart, wait
from tests.support.faults.triggers import Faults


class FaultyServer(SimServer):
    """A server with faults, from its start on.

    Args:
        config: as of :class:`SimServer`, which also takes the other settings.
        faults: what happens to it; several faults of one call happen in this order.
        seed: seed of the random draws.
    """

    def __init__(
        self,
        config: SimConfig | None = None,
        *,
        faults: Sequence[Fault],
        seed: Sequence[int] = (0, 0),
        **settings: Any,
    ) -> None:
        self.faults = Faults(faults, seed)

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answer(request, handler)

        super().__init__(config, middlewares=[answer], **settings)
        self._rates: list[float] = []
        self._slowdowns: set[asyncio.Task[None]] = set()
        self._restarts: set[asyncio.Task[None]] = set()
        self._dead = False
        self._awake = asyncio.Event()
        self._awake.set()

    async def start(self) -> None:
        await super().start()
        self.faults.start(asyncio.get_running_loop().time)
        for met in self.faults.by_the_clock():
            _keep(self._restarts, self._start_at(met))

    async def stop(self) -> None:
        tasks = [*self._slowdowns, *self._restarts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().stop()

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        mets = self.faults.meet(request.path)
        try:
            for met in mets:
                if isinstance(met.fault, EngineWide) and self._start_fault(met) and self._dead:
                    await _wait_for_cancellation()
            await self._awake.wait()
            for met in mets:
                if (answer := await met.fault.before(met)) is not None:
                    return answer
            request[STREAM_FILTER] = partial(self._change_stream, request.path)
            own = await handler(request)
            for met in mets:
                # A streamed answer was sent by now and cannot be changed.
                if isinstance(own, web.Response) and met.fault.changes_answer() and met.fire():
                    return await _change_answer(met, request, own)
            return own
        except (Broken, EngineError, ConnectionResetError):
            # A fault demands it, the engine died under the call, or the client is gone.
            reset(request.transport)
            return await _wait_for_cancellation()

    async def _change_stream(self, path: str, items: Items) -> Items:
        async with AsyncExitStack() as stack:
            for met in self.faults.meet(path, in_stream=True):
                items = await stack.enter_async_context(aclosing(_changed(met, items)))
            async for item in items:
                yield item

    def _start_fault(self, met: Met) -> bool:
        """Start a fault of the engine; return False if the engine is dead or it is used up."""
        if self._dead or not met.fire():
            return False
        if isinstance(met.fault, Restart):
            self._dead = True
            _keep(self._restarts, self._restart_after(met.fault))
        elif isinstance(met.fault, Hang):
            _keep(self._slowdowns, self._slow_down(met.fault))
        return True

    async def _start_at(self, met: Met) -> None:
        await wait(met.fault.at)
        self._start_fault(met)

    async def _slow_down(self, fault: Hang) -> None:
        self._rates.append(fault.rate)
        self._apply_rates()
        try:
            await wait(fault.seconds)
        finally:
            self._rates.remove(fault.rate)
            self._apply_rates()

    async def _restart_after(self, fault: Restart) -> None:
        for task in self._slowdowns:
            task.cancel()
        await self.crash()
        await wait(fault.seconds)
        await self.restart(keeps_weights=fault.keeps_weights)
        self._dead = False

    def _apply_rates(self) -> None:
        rate = math.prod(self._rates)
        self.engine.decode_at(rate)
        if rate:
            self._awake.set()
        else:
            self._awake.clear()


async def _change_answer(met: Met, request: web.Request, own: web.Response) -> web.StreamResponse:
    response = web.StreamResponse(status=own.status)
    response.content_type = own.content_type
    body = own.body if isinstance(own.body, bytes) else b""
    async with aclosing(met.fault.pieces(met, body)) as pieces:
        async for piece in pieces:
            if not response.prepared:
                await response.prepare(request)
            await response.write(piece)
    if not response.prepared:
        await response.prepare(request)
    return response


async def _changed(met: Met, items: Items) -> AsyncGenerator[Any, None]:
    fault, tokens, happened = met.fault, 0, False
    async for item in items:
        if not happened and isinstance(item, dict):
            reached = tokens >= (fault.after_tokens or 0)
            tokens += len(item.get("output_ids", ()))
            happened = reached and fault.fits(item) and met.fire()
            if happened:
                async with aclosing(fault.instead(met, item, items)) as changed:
                    async for other in changed:
                        yield other
                continue
        yield item


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _wait_for_cancellation() -> web.StreamResponse:
    """Wait for the cancellation of the handler, which follows the loss of its connection."""
    await asyncio.Event().wait()
    raise AssertionError("nothing sets the event")
