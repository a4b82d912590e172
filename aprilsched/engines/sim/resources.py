"""The LoRA adapters that a simulated engine has loaded, and the memory that it has released."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aprilsched.engines.sim.batcher import Batcher
from aprilsched.errors import EngineError, EngineRejected


class Adapters:
    """The adapters of one engine; its methods belong to one loop."""

    def __init__(self, name: str, batcher: Batcher) -> None:
        self._name = name
        self._batcher = batcher
        self._lock = asyncio.Lock()
        self._unloading: tuple[str, asyncio.Future[None]] | None = None

    async def load(self, adapter: str, key: int) -> None:
        """Serve `adapter` with the weights key `key` from now on.

        Raises:
            EngineRejected: (400) if the name is loaded already, as in SGLang.
        """
        async with self._lock:
            if adapter in self._batcher.adapters:
                why = f"adapter {adapter!r} is already loaded; unload it first."
                raise EngineRejected(self._name, why, status=400)
            self._batcher.adapters[adapter] = key or 1

    async def unload(self, adapter: str) -> bool:
        """Refuse new requests of `adapter` and wait for its last one; False if it is unknown."""
        async with self._lock:
            if self._batcher.adapters.pop(adapter, None) is None:
                return False
            if self._batcher.samples_with(adapter):
                ended = asyncio.get_running_loop().create_future()
                self._unloading = adapter, ended
                try:
                    await ended
                finally:
                    self._unloading = None
            return True

    def complete_unload(self) -> None:
        """Complete a pending unload if no request samples with its adapter any more."""
        if self._unloading is not None:
            adapter, ended = self._unloading
            if not ended.done() and not self._batcher.samples_with(adapter):
                ended.set_result(None)

    def fail_unload(self, error: EngineError) -> None:
        """Fail a pending unload: the engine is lost, so the last request will not end."""
        if self._unloading is not None and not self._unloading[1].done():
            self._unloading[1].set_exception(error)


TAGS = ("kv_cache", "weights", "cuda_graph")
"""The parts of the memory that can be released."""


class Memory:
    """The parts of one engine's memory; each method returns why it refuses, or None."""

    def __init__(self) -> None:
        self.released: frozenset[str] = frozenset()

    def release(self, tags: Sequence[str]) -> str | None:
        """Release the parts `tags`."""
        if unknown := sorted(set(tags) - set(TAGS)):
            return f"memory has no part {unknown[0]!r}; release some of {', '.join(TAGS)}."
        if twice := sorted(self.released & set(tags)):
            return f"{twice[0]} is released already; release each part once."
        self.released |= set(tags)
        return None

    def wake(self, tags: Sequence[str]) -> str | None:
        """Take the parts `tags` back."""
        if awake := sorted(set(tags) - self.released):
            return f"{awake[0]!r} was not released; wake only what was."
        self.released -= set(tags)
        return None

    def lacks(self, *needed: str) -> str | None:
        """Say whether a part that is `needed` is released; without arguments, any part."""
        if missing := sorted(self.released & set(needed or TAGS)):
            return f"its {missing[0]} is released; wake it first."
        return None
