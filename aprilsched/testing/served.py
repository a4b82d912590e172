"""The embedded engine as one SGLang process sees it: what steers it.

What SGLang does at the edges is done here too: an update outside of a pause waits for every
running request and lets none in; the default pause ends all requests and looks once a second
whether they are gone; the loads are those of before the pause for as long as it lasts.
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
"""Between two looks of a pause in abort mode; SGLang's own."""
FLUSH_POLL_SECONDS = 0.05


class ServedEngine(ServedRequests):
    """One engine, its requests and its control calls. Lives on one loop."""

    def __init__(self, engine: SimEngine, config: SimConfig, *, time_scale: float) -> None:
        super().__init__(engine, config, time_scale=time_scale)
        self.adapters: dict[str, str] = {}
        """The path of each adapter that is loaded."""
        self._updating = False

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop; "abort" first ends what runs."""
        if not self.paused:
            self._stale = self._loads()
        if mode != "abort":
            await self._pause(mode)
            return
        if self.paused:
            await self._pause("retract")  # an abort under in_place would wait for continue
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
        """Go on."""
        await self.engine.resume()
        self._stale = None

    async def flush(self, timeout: float) -> bool:  # noqa: ASYNC109 - the query's own name
        """Drop all KV, within `timeout` seconds; False while it is in use."""
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
        """Take the weights in `path`; why not, if they cannot be had."""
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
        """Call the same weights `label`, also while requests run."""
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
        """Have other weights from the start than those of version 0."""
        self.model_path = path
        await self.engine.refit(self._version(label), key)

    def begin_update(self) -> bool:
        """Open an update in parts; False if one is open."""
        opened, self._updating = not self._updating, True
        return opened

    def end_update(self) -> bool:
        """Close it; False if none is open."""
        closed, self._updating = self._updating, False
        return closed

    async def load_adapter(self, name: str, path: str) -> str | None:
        """Serve the adapter in `path` as well; why not, if it cannot be had."""
        try:
            await self.engine.load_adapter(name, Path(path))
        except EngineError as error:
            return str(error)
        self.adapters[name] = path
        return None

    async def unload_adapter(self, name: str) -> str | None:
        """Forget an adapter once its last request has ended; why not, if it is not there."""
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
        """Nothing runs inside; a pause has that already."""
        if self.paused:
            yield
            return
        async with self._closed():
            await self._quiet.wait()
            yield

    @asynccontextmanager
    async def _closed(self) -> AsyncGenerator[None, None]:
        """New requests wait outside."""
        self._closures += 1
        self._gate.clear()
        try:
            yield
        finally:
            self._closures -= 1
            if not self._closures:
                self._gate.set()
