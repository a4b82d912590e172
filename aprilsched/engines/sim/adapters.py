"""Which LoRA adapters a simulated engine has, and when one may go.

As in SGLang, an adapter is unloaded when its last request has ended, and until then no other
adapter is loaded or unloaded. One difference: SGLang would load an unloaded adapter again for a
request that names it; here such a request is refused.
"""

from __future__ import annotations

import asyncio

from aprilsched.engines.sim.batcher import Batcher
from aprilsched.errors import EngineError, EngineRejected

__all__ = ["Adapters"]


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
