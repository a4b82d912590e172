"""A served engine as an SGLang process has it: its requests by rid, and its control calls.

Invariants:
- Every change of the label makes a new version of the engine. Adjacent tokens of one label are
  one span, as SGLang reports it.
- As in SGLang, an abort needs an exact rid and then ends every request whose rid begins with it; a
  second abort of one rid is not passed on.
- As in SGLang, an update outside of a pause waits for every running request and admits none; the
  default pause ends all requests and checks once a second whether they are gone; during a pause
  the reported load is that before the pause.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import zlib
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from aiohttp import web

from aprilsched.engines.base import Chunk, GenerationRequest
from aprilsched.engines.sim.settings import Counters, SimConfig
from aprilsched.engines.sim.sim_engine import SimEngine
from aprilsched.errors import EngineError, EngineRejected
from aprilsched.serving import Refused, labelled
from aprilsched.types import VersionSpan

MODEL = "aprilsched-sim"
ABORT_POLL_SECONDS = 1.0
"""Time between two checks of a pause in abort mode, as in SGLang."""
FLUSH_POLL_SECONDS = 0.05


@dataclass(slots=True)
class Call:
    """One generation in flight."""

    request: GenerationRequest
    entered: bool = False
    abort_sent: bool = False
    retractions: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Loads:
    """The figures of /v1/loads at `timestamp` of the wall clock."""

    running: int
    waiting: int
    kv_in_use: int
    counters: Counters
    timestamp: float


class ServedRequests:
    """One engine and its requests; it belongs to one loop."""

    def __init__(self, engine: SimEngine, config: SimConfig, *, time_scale: float) -> None:
        self.engine = engine
        self.config = config
        self.model_path = MODEL
        self.time_scale = time_scale
        self.random_seed = secrets.randbelow(2**31)
        """The seed that a server draws at its start; it distinguishes one process from another."""
        self._labels = {0: "default"}
        self._calls: dict[str, Call] = {}
        self._stale: Loads | None = None
        self._late: set[asyncio.Task[None]] = set()
        self._closures = 0
        self._gate = asyncio.Event()
        self._gate.set()
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def label(self) -> str:
        """The label of the engine's current weights."""
        return self._labels[self.engine.batcher.version]

    @property
    def paused(self) -> bool:
        return self.engine.batcher.paused is not None

    @property
    def retracted(self) -> bool:
        return self.engine.batcher.paused == "retract"

    @property
    def loads(self) -> Loads:
        """The load of the scheduler; during a pause, the load before it."""
        return self._stale or self._loads()

    def _loads(self) -> Loads:
        batcher = self.engine.batcher
        waiting = max(batcher.waiting, len(self._entered()) - batcher.running)
        return Loads(
            running=batcher.running,
            waiting=waiting,
            kv_in_use=batcher.kv_in_use,
            counters=replace(batcher.counters),
            timestamp=time.time(),
        )

    def labelled(self, spans: tuple[VersionSpan, ...], tokens: int) -> list[dict[str, str | int]]:
        """The `spans` over the first `tokens` tokens, with labels instead of versions."""
        clipped = ((span.version, span.start, min(span.end, tokens)) for span in spans)
        return labelled(clipped, self._labels.__getitem__)

    # -- requests ---------------------------------------------------------------------------

    async def generate(self, call: Call) -> AsyncGenerator[Chunk, None]:
        """Stream one response; if it is left early, its request is aborted.

        Raises:
            Refused: if the rid is in use, or the request can never fit.
        """
        rid = call.request.request_id
        if rid in self._calls:
            raise Refused(f"Duplicate request ID detected: {rid}")
        self._calls[rid] = call
        try:
            await self._gate.wait()
            call.entered = True
            self._quiet.clear()
            async with aclosing(self.engine.generate(call.request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except EngineRejected as error:
            raise Refused(str(error)) from error
        finally:
            del self._calls[rid]
            if not self._entered():
                self._quiet.set()

    def _entered(self) -> list[Call]:
        return [call for call in self._calls.values() if call.entered]

    async def abort(self, rid: str) -> None:
        """End the request `rid` and all whose rids begin with it; ignore an unknown rid."""
        call = self._calls.get(rid)
        if call is None or call.abort_sent:
            return
        call.abort_sent = True
        for other in [name for name in self._calls if name.startswith(rid)]:
            await self.engine.abort(other)

    async def abort_all(self) -> None:
        """End every request except those that a pause holds."""
        for rid in list(self._calls):
            await self.engine.abort(rid)

    def abort_later(self, seconds: float, rid: str) -> None:
        """Abort `rid` in so many seconds, whichever request has this rid then."""

        async def work() -> None:
            await asyncio.sleep(seconds * self.time_scale)
            await self.abort(rid)

        task = asyncio.create_task(work())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def cancel_late_aborts(self) -> None:
        """Cancel the late aborts."""
        for task in self._late:
            task.cancel()


class ServedEngine(ServedRequests):
    """One engine, its requests and its control calls; it belongs to one loop."""

    def __init__(self, engine: SimEngine, config: SimConfig, *, time_scale: float) -> None:
        super().__init__(engine, config, time_scale=time_scale)
        self.adapters: dict[str, str] = {}
        """The path of each loaded adapter."""
        self.groups: dict[str, tuple[int, int]] = {}
        """The rank offset and the size of each group that trainers broadcast weights in."""
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
        # The engine may also have requests of clients that have left, until their late aborts.
        running = not self.paused
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

    async def take_bucket(self, content: bytes) -> str | None:
        """Take new weights, which follow from the present ones and `content`; return why not."""
        if not self._updating:
            return "begin_weight_update must be called first"
        batcher = self.engine.batcher
        try:
            await self.engine.refit(batcher.version, zlib.crc32(content, batcher.weights_key))
        except EngineRejected as error:
            return str(error)
        return None

    def join_group(self, name: str, rank_offset: int, world_size: int) -> bool:
        """Join a group; return False if there is one of this name."""
        joined = name not in self.groups
        self.groups.setdefault(name, (rank_offset, world_size))
        return joined

    def leave_group(self, name: str) -> bool:
        """Leave a group; return False if it is unknown."""
        return self.groups.pop(name, None) is not None

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


SERVED: web.AppKey[ServedEngine] = web.AppKey("served", ServedEngine)
"""The key under which the handlers find their engine in the application."""
