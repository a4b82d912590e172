"""Embedded engines that restart unannounced, die, get other weights, slow down, join and leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from aprilsched.kernel.engines.base import FleetChange
from aprilsched.simulation.engine import SimEngine
from aprilsched.simulation.engine.toy_model import weights_key_of_version
from tests.campaign.history import History
from tests.campaign.mix import Mix


class ChaosFleet:
    """Engines "sim-0", "sim-1", …; the history records every action on one."""

    def __init__(self, mix: Mix, history: History) -> None:
        self._mix = mix
        self._note = history.note
        self._made = 0
        self._members: list[SimEngine] = []
        self.all: list[SimEngine] = []
        """Every engine that has been a member."""
        self.down: set[str] = set()
        """Engines that crashed and have not restarted."""
        self._changes: asyncio.Queue[FleetChange] = asyncio.Queue()
        self._open = False
        for _ in range(mix.engines):
            self._members.append(self._make())

    def _make(self) -> SimEngine:
        mix = self._mix
        engine = SimEngine(
            f"sim-{self._made}",
            mix.machine,
            refit_seconds=mix.refit_seconds,
            pause_seconds=mix.pause_seconds,
        )
        self._made += 1
        self.all.append(engine)
        return engine

    @property
    def engines(self) -> Sequence[SimEngine]:
        return tuple(self._members)

    async def open(self) -> None:
        for engine in self._members:
            if engine.name in self.down:
                self.down.discard(engine.name)
                await engine.restart()
            await engine.open()
        self._open = True

    async def close(self) -> None:
        self._open = False
        for engine in self.all:
            await engine.close()

    async def watch(self) -> AsyncGenerator[FleetChange, None]:
        self._changes = asyncio.Queue()
        while True:
            yield await self._changes.get()

    def restart(self, engine: SimEngine, version: int, after: float = 0.0) -> None:
        """Replace the server's process by one with the weights of `version`."""
        work = "busy" if engine.batcher.running or engine.batcher.waiting else "idle"
        paused = f", paused ({engine.batcher.paused})" if engine.batcher.paused else ""
        self._note(
            f"CHAOS {engine.name} ({work}{paused}, of version {engine.batcher.version}) restarts "
            f"unannounced with the weights of version {version}, after {after:g} s"
        )
        engine.crash()
        self.down.add(engine.name)
        if after:
            loop = asyncio.get_running_loop()
            loop.call_later(after, self._begin, engine, version)
        else:
            self._begin(engine, version)

    def _begin(self, engine: SimEngine, version: int) -> None:
        if engine.name in self.down and self._open:
            self.down.discard(engine.name)
            # The coroutine never waits: a restarted engine is available at once.
            starting = engine.restart()
            try:
                starting.send(None)
            except StopIteration:
                pass
            else:
                raise RuntimeError("SimEngine.restart() waits for something")
            engine.batcher.refit(version, weights_key_of_version(version))

    def foreign_refit(self, engine: SimEngine, version: int) -> None:
        """Load weights as another client would, if the engine accepts them."""
        if engine.name in self.down:
            return
        before = engine.batcher.version
        if engine.batcher.refit(version, weights_key_of_version(version)):
            self._note(
                f"CHAOS another client loads version {version} into {engine.name}, "
                f"which had {before}"
            )

    def slow_down(self, engine: SimEngine, rate: float, seconds: float) -> None:
        self._note(f"CHAOS {engine.name} computes at {rate:g} of its speed for {seconds:g} s")
        engine.decode_at(rate)
        asyncio.get_running_loop().call_later(seconds, engine.decode_at, 1.0)

    def usual_speed(self) -> None:
        for engine in self.all:
            engine.decode_at(1.0)

    def restart_the_dead(self) -> None:
        for engine in self.all:
            self._begin(engine, engine.batcher.version)

    async def left_on_engines(self) -> list[str]:
        """Return what a closed scheduler has wrongly left on the engines."""
        found: list[str] = []
        for engine in self.all:
            inside = engine.batcher
            if inside.paused is not None:
                found.append(f"{engine.name} is left paused ({inside.paused})")
            if lent := await engine.released():
                found.append(f"{engine.name} is left without its {sorted(lent)}")
            if inside.running or inside.waiting:
                work = f"{inside.running} running and {inside.waiting} waiting"
                found.append(f"{engine.name} has {work} requests after close()")
        return found

    def pause_again(self, paused: Mapping[str, Any]) -> None:
        """Pause the engines that a killed process left paused; restart those outside the fleet."""
        for engine in self.all:
            if engine.batcher.paused is not None and engine not in self._members:
                self.down.add(engine.name)
        for engine in self._members:
            if engine.name in paused:
                engine.batcher.pause(paused[engine.name], engine.batcher.next_event_time() or 0.0)

    async def change(self, draw: random.Random, most: int) -> None:
        """Let one engine join or leave."""
        if not self._open:
            return
        if len(self._members) > 1 and draw.random() < 0.5:
            engine = draw.choice(self._members)
            self._members.remove(engine)
            self._note(f"CHAOS {engine.name} leaves the fleet")
            self._changes.put_nowait(FleetChange(left=(engine.name,)))
        elif len(self._members) < most:
            left = [e for e in self.all if e not in self._members and e.name not in self.down]
            engine = draw.choice(left) if left and draw.random() < 0.5 else self._make()
            await engine.open()
            if engine.batcher.running or engine.batcher.waiting:
                return
            self._members.append(engine)
            version = engine.batcher.version
            self._note(f"CHAOS {engine.name} joins the fleet, with version {version}")
            self._changes.put_nowait(FleetChange(joined=(engine,)))
