"""Carries out the faults of the whole engine: it hangs, decodes slowly, dies or restarts.

Invariants:

- Overlapping faults add up: the engine decodes at the product of the factors, and calls wait until
  the last hang has ended.
- A new process neither hangs nor is slow.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, Protocol

from aprilsched.engines.sim.engine import SimEngine
from aprilsched.testing.faults.broken import wait
from aprilsched.testing.faults.choosing import Faults, Met
from aprilsched.testing.faults.kinds import Die, EngineWide, Hang, Slow

__all__ = ["EngineFaults", "Server"]


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
