"""The control calls of a served engine, as an SGLang process carries them out.

It behaves like SGLang in the corner cases: an update outside of a pause waits for every running
request and admits none; the default pause ends all requests and checks once a second whether they
are gone; during a pause the reported load is that before the pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from aprilsched.engines.sim.config import SimConfig
from aprilsched.engines.sim.engine import SimEngine
from aprilsched.errors import EngineError, EngineRejected
from aprilsched.testing.requests import ServedRequests

__all__ = ["ServedEngine"]

ABORT_POLL_SECONDS = 1.0
"""Time between two checks of a pause in abort mode, as in SGLang."""
FLUSH_POLL_SECONDS = 0.05


class ServedEngine(ServedRequests):
    """One engine, its requests and its control calls; it belongs to one loop."""

    def __init__(self, engine: SimEngine, config: SimConfig, *, time_scale: float) -> None:
        super().__init__(engine, config, time_scale=time_scale)
        self.adapters: dict[str, str] = {}
        """The path of each loaded adapter."""
        self._updating = False

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Pause; the mode "abort" ends all running requests first."""
        if not self.paused:
            self._stale = self._loads()
        if mode != "abort":
            await self._pause(mode)
            return
        if self.paused:
            await self._pause("retract")  # An abort under in_place would wait for the continue.
        held = self.engine.batcher.is_held
        async with self._closed():
            await self.abort_all()
            while any(not held(call.request.request_id) for call in self._entered()):
                await asyncio.sleep(ABORT_POLL_SECONDS * self.time_scale)
                await self.abort_all()
            await self._pause("retract")

    async def _pause(self, mode: Literal["retract", "in_place"]) -> None:
        if mode == "retract" and not self.retracted:
            for call in self._entered():
                call.retractions += 1
        await self.engine.pause(mode)

    async def resume(self) -> None:
        """Continue after a pause."""
        await self.engine.resume()
        self._stale = None

    async def flush(self, timeout: float) -> bool:  # noqa: ASYNC109 - the query's own name
        """Drop all KV, within `timeout` seconds; return False while it is in use."""
        try:
            async with asyncio.timeout(timeout or None):
                while True:
                    try:
                        await self.engine.flush()
                        return True
                    except EngineRejected:
                        if not timeout:
                            return False
                    await asyncio.sleep(FLUSH_POLL_SECONDS)
        except TimeoutError:
            return False

    async def update(self, path: str, label: str | None, *, flush: bool) -> str | None:
        """Load the weights in `path`; return why not, if that fails."""
        version = self._version(label or self.label)
        try:
            async with self._exclusive():
                if flush:
                    await self.engine.flush()
                await self.engine.update_from_disk(Path(path), version)
        except EngineError as error:
            return str(error)
        self.model_path = path
        return None

    async def relabel(self, label: str) -> None:
        """Give the weights the label `label`, even while requests run."""
        version, key = self._version(label), self.engine.batcher.weights_key
        running = not self.paused and bool(self._entered())
        if running:
            await self.engine.pause("in_place")
        try:
            await self.engine.refit(version, key)
        finally:
            if running:
                await self.engine.resume()

    async def begin_with(self, path: str, label: str, key: int) -> None:
        """Start with other weights than those of version 0."""
        self.model_path = path
        await self.engine.refit(self._version(label), key)

    def begin_update(self) -> bool:
        """Begin an update in parts; return False if one is open."""
        opened, self._updating = not self._updating, True
        return opened

    def end_update(self) -> bool:
        """End the update in parts; return False if none is open."""
        closed, self._updating = self._updating, False
        return closed

    async def load_adapter(self, name: str, path: str) -> str | None:
        """Load the adapter in `path`; return why not, if that fails."""
        try:
            await self.engine.load_adapter(name, Path(path))
        except EngineError as error:
            return str(error)
        self.adapters[name] = path
        return None

    async def unload_adapter(self, name: str) -> str | None:
        """Remove an adapter after its last request; return why not, if it is unknown."""
        if self.adapters.pop(name, None) is None:
            return f"LoRA with name {name} does not exist."
        await self.engine.unload_adapter(name)
        return None

    def _version(self, label: str) -> int:
        version = max(self._labels) + 1
        self._labels[version] = label
        return version

    @asynccontextmanager
    async def _exclusive(self) -> AsyncGenerator[None, None]:
        """Wait until nothing runs, and keep it so; a pause ensures that already."""
        if self.paused:
            yield
            return
        async with self._closed():
            await self._quiet.wait()
            yield

    @asynccontextmanager
    async def _closed(self) -> AsyncGenerator[None, None]:
        """Let new requests wait."""
        self._closures += 1
        self._gate.clear()
        try:
            yield
        finally:
            self._closures -= 1
            if not self._closures:
                self._gate.set()
