"""Measures how long an update takes on one engine, step by step.

Times are on the event loop's clock. From the begin of the update until the engine runs again, the
steps of one engine follow each other, so that their sum can be compared with the whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aprilsched.kernel.core.messages.facts import EngineModeChanged, Fact, UpdateBegun
from aprilsched.kernel.core.state.engine_control import Mode
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.engines.sglang import SGLangEngine
from aprilsched.kernel.weights.publisher import WeightPublisher

STEPS = {
    "pause": Mode.PAUSING,
    "flush": Mode.FLUSHING,
    "refit": Mode.REFITTING,
    "continue": Mode.CONTINUING,
}
"""The engine's mode in each step."""
_CALLS = ("pause", "flush", "version", "resume")
"""What an update asks of an engine besides the weights."""
_WEIGHTS = "update_weights_from_disk"


class Timeline:
    """A listener that notes when the steps of the present update began and ended."""

    def __init__(self) -> None:
        self.requested = 0.0
        self.cpu = 0.0
        self.started_at: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.continued = asyncio.Event()
        self.calls: list[tuple[str, float]] = []
        """Calls that the engine was asked for and how long each took to be answered."""
        self.publish = 0.0

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        for fact in facts:
            if isinstance(fact, UpdateBegun):
                self.started_at, self.ended, self.calls = {}, {}, []
                self.requested, self.cpu = now, time.process_time()
                self.continued.clear()
            elif isinstance(fact, EngineModeChanged):
                self._change(fact, now)

    def _change(self, fact: EngineModeChanged, now: float) -> None:
        for step, mode in STEPS.items():
            if fact.finish == mode:
                self.started_at[step] = now
            elif fact.start == mode:
                self.ended[step] = now
        if fact.start == Mode.CONTINUING:
            self.cpu = time.process_time() - self.cpu
            self.continued.set()

    def figures(self) -> dict[str, float]:
        """Seconds of the update that has just ended."""
        whole = self.ended["continue"] - self.requested
        overhead = whole - self.publish
        engine = sum(seconds for _, seconds in self.calls)
        steps = {step: self.ended[step] - self.started_at[step] for step in STEPS}
        return {
            "whole": whole,
            "publish": self.publish,
            "overhead": overhead,
            "pause": steps["pause"],
            "flush": steps["flush"],
            "verify": steps["refit"] - self.publish,
            "continue": steps["continue"],
            "engine": engine,
            "client": overhead - engine,
            "cpu": self.cpu,
        }

    def watch(self, engine: Engine) -> None:
        """Time what is asked of `engine`: of a server its HTTP calls, else the calls themselves."""
        if isinstance(engine, SGLangEngine):
            transport: Any = engine._transport
            transport.call = self._timed_http(transport.call)
            return
        for name in _CALLS:
            setattr(engine, name, self._timed(name, getattr(engine, name)))

    def _timed(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def timed(*args: Any) -> Any:
            started_at = asyncio.get_running_loop().time()
            try:
                return await call(*args)
            finally:
                self.calls.append((name, asyncio.get_running_loop().time() - started_at))

        return timed

    def _timed_http(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def timed(method: str, path: str, *args: Any, **more: Any) -> Any:
            started_at = asyncio.get_running_loop().time()
            try:
                return await call(method, path, *args, **more)
            finally:
                if path != _WEIGHTS:  # that is the refit itself
                    self.calls.append((path, asyncio.get_running_loop().time() - started_at))

        return timed


class TimedPublisher:
    """`publisher`, with the time that its :meth:`publish` takes noted."""

    def __init__(self, publisher: WeightPublisher, timeline: Timeline) -> None:
        self._publisher = publisher
        self._timeline = timeline

    async def prepare(self, version: int) -> None:
        await self._publisher.prepare(version)

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        started_at = asyncio.get_running_loop().time()
        try:
            return await self._publisher.publish(version, engines)
        finally:
            self._timeline.publish = asyncio.get_running_loop().time() - started_at


def empty_checkpoint(directory: Path) -> Path:
    """What an engine that looks at no tensor takes for a checkpoint."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory
