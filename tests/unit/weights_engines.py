"""Small engines for tests that take weights and remember their order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

from aprilsched.errors import EngineRejected
from aprilsched.kernel.engines.base import Engine
from aprilsched.kernel.values.capabilities import Capabilities

__all__ = ["SocketEngine", "TensorEngine", "as_engines"]


class _Named:
    def __init__(self, name: str, *, ranks: int = 1, fails_at: int | None = None) -> None:
        self.name = name
        self.capabilities = Capabilities(version_spans=True, flush_while_paused=True, ranks=ranks)
        self.calls: list[tuple[Any, ...]] = []
        self.loading = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._fails_at = fails_at
        self._parts = 0

    async def _load(self) -> None:
        self.loading.set()
        await self.may_answer.wait()
        self._parts += 1
        if self._parts == self._fails_at:
            raise EngineRejected(self.name, "is out of memory.", status=400)


class TensorEngine(_Named):
    """Has the methods of RefitFromTensors."""

    async def begin_update(self) -> None:
        self.calls.append(("begin",))

    async def end_update(self, version: int) -> None:
        self.calls.append(("end", version))

    async def update_from_tensors(self, serialized: Sequence[str], *, load_format: str) -> None:
        self.calls.append(("tensors", tuple(serialized), load_format))
        await self._load()


class SocketEngine(_Named):
    """Has the method of RefitFromSockets."""

    async def update_from_sockets(self, handles: Mapping[str, str], version: int) -> None:
        self.calls.append(("sockets", dict(handles), version))
        await self._load()


def as_engines(*engines: _Named) -> list[Engine]:
    """The objects typed as engines; they have everything that a publisher uses of an engine."""
    return [cast(Engine, engine) for engine in engines]
