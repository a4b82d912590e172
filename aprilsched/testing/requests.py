"""The embedded engine's requests as one SGLang process sees them: by rid, under labelled weights.

Invariants:
- A label of the weights belongs to a version of the engine, each change to a new one; adjacent
  tokens of one label are one span, as SGLang reports it.
- An abort wants an exact rid, and then ends every request that begins with it; a second abort of
  one rid is not passed on. Both are SGLang's.
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
    """What /v1/loads tells, as it was at `timestamp` of the wall clock."""

    running: int
    waiting: int
    kv_in_use: int
    counters: Counters
    timestamp: float


class ServedRequests:
    """One engine and its requests. Lives on one loop, between :meth:`open` and :meth:`close`."""

    def __init__(self, engine: SimEngine, config: SimConfig, *, time_scale: float) -> None:
        self.engine = engine
        self.config = config
        self.model_path = MODEL
        self.time_scale = time_scale
        self.random_seed = secrets.randbelow(2**31)
        """What a server draws when it starts, unless it is given one: it tells its process."""
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
        """Of the weights that the engine has now."""
        return self._labels[self.engine.batcher.version]

    @property
    def paused(self) -> bool:
        return self.engine.batcher.paused is not None

    @property
    def retracted(self) -> bool:
        return self.engine.batcher.paused == "retract"

    @property
    def loads(self) -> Loads:
        """Requests known to the scheduler; while paused, those of before the pause."""
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
        """`spans` over the first `tokens` tokens, with labels instead of versions."""
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
        """One response; left early, its request is aborted.

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
        """End the request `rid`, and all that begin with it; unknown ones are ignored."""
        call = self._calls.get(rid)
        if call is None or call.abort_sent:
            return
        call.abort_sent = True
        for other in [name for name in self._calls if name.startswith(rid)]:
            await self.engine.abort(other)

    async def abort_all(self) -> None:
        """End every request but those that a pause holds."""
        for rid in list(self._calls):
            await self.engine.abort(rid)

    def later(self, seconds: float, rid: str) -> None:
        """Abort `rid` in so many seconds, whoever has it then."""

        async def work() -> None:
            await asyncio.sleep(seconds * self.time_scale)
            await self.abort(rid)

        task = asyncio.create_task(work())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    def forget(self) -> None:
        """Abort nothing any more."""
        for task in self._late:
            task.cancel()
