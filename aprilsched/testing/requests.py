"""The requests of a served engine as an SGLang process has them: by rid, under labelled weights.

Invariants:
- Every change of the label makes a new version of the engine. Adjacent tokens of one label are
  one span, as SGLang reports it.
- As in SGLang, an abort needs an exact rid and then ends every request whose rid begins with it; a
  second abort of one rid is not passed on.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from aprilsched.engines.base import Chunk, GenerationRequest
from aprilsched.engines.sim.config import Counters, SimConfig
from aprilsched.engines.sim.engine import SimEngine
from aprilsched.errors import EngineRejected
from aprilsched.testing.refusals import Refused
from aprilsched.types import VersionSpan

__all__ = ["MODEL", "Call", "Loads", "ServedRequests"]

MODEL = "aprilsched-sim"


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
        found: list[dict[str, str | int]] = []
        for span in spans:
            label, end = self._labels[span.version], min(span.end, tokens)
            if found and found[-1]["version"] == label:
                found[-1]["end"] = end
            elif span.start < end:
                found.append({"version": label, "start": span.start, "end": end})
        return found

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
