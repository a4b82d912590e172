"""What a simulated engine has loaded or lent: LoRA adapters, and memory for the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aprilsched.engines.sim.batcher import Batcher
from aprilsched.errors import EngineError, EngineRejected

__all__ = ["TAGS", "Adapters", "Memory"]


class Adapters:
    """The adapters of one engine, on one loop."""

    def __init__(self, name: str, batcher: Batcher) -> None:
        self._name = name
        self._batcher = batcher
        self._lock = asyncio.Lock()
        self._leaving: tuple[str, asyncio.Future[None]] | None = None

    async def load(self, adapter: str, key: int) -> None:
        """Serve `adapter`, of weights `key`, from now on.

        Raises:
            EngineRejected: (400) the name is loaded, as in SGLang.
        """
        async with self._lock:
            if adapter in self._batcher.adapters:
                why = f"adapter {adapter!r} is already loaded; unload it first."
                raise EngineRejected(self._name, why, status=400)
            self._batcher.adapters[adapter] = key or 1

    async def unload(self, adapter: str) -> bool:
        """Refuse new requests of `adapter`, wait for its last one; False if there is none."""
        async with self._lock:
            if self._batcher.adapters.pop(adapter, None) is None:
                return False
            if self._batcher.samples_with(adapter):
                ended = asyncio.get_running_loop().create_future()
                self._leaving = adapter, ended
                try:
                    await ended
                finally:
                    self._leaving = None
            return True

    def look(self) -> None:
        """Requests may have ended: let an adapter go that nothing samples with any more."""
        if self._leaving is not None:
            adapter, ended = self._leaving
            if not ended.done() and not self._batcher.samples_with(adapter):
                ended.set_result(None)

    def give_up(self, error: EngineError) -> None:
        """The engine is gone: nobody's last request ends any more."""
        if self._leaving is not None and not self._leaving[1].done():
            self._leaving[1].set_exception(error)


TAGS = ("kv_cache", "weights", "cuda_graph")
"""The parts that can be released."""


class Memory:
    """The parts of one engine's memory; every method answers why not, or None."""

    def __init__(self) -> None:
        self.released: frozenset[str] = frozenset()

    def release(self, tags: Sequence[str]) -> str | None:
        """Give `tags` away."""
        if unknown := sorted(set(tags) - set(TAGS)):
            return f"memory has no part {unknown[0]!r}; release some of {', '.join(TAGS)}."
        if twice := sorted(self.released & set(tags)):
            return f"{twice[0]} is released already; release each part once."
        self.released |= set(tags)
        return None

    def wake(self, tags: Sequence[str]) -> str | None:
        """Take `tags` back."""
        if awake := sorted(set(tags) - self.released):
            return f"{awake[0]!r} was not released; wake only what was."
        self.released -= set(tags)
        return None

    def lacks(self, *needed: str) -> str | None:
        """Whether something that is `needed` is away; without names, anything at all."""
        if missing := sorted(self.released & set(needed or TAGS)):
            return f"its {missing[0]} is released; wake it first."
        return None
