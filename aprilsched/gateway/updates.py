"""How weights reach every engine when a client of the gateway sends them to one address."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from aprilsched.engines.base import Engine
from aprilsched.engines.refit import RefitFromDisk
from aprilsched.errors import ConfigError

__all__ = ["FromDisk"]


class FromDisk:
    """Lets every engine load a directory, which the engines see and the gateway need not see."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    async def prepare(self, version: int) -> None:
        """Do nothing: the client has written the directory."""

    async def publish(
        self, version: int, engines: Sequence[Engine]
    ) -> Mapping[str, Exception | None]:
        """Load the directory into all engines, in parallel."""
        outcomes = await asyncio.gather(*(self._load(version, engine) for engine in engines))
        return {engine.name: outcome for engine, outcome in zip(engines, outcomes, strict=True)}

    async def _load(self, version: int, engine: Engine) -> Exception | None:
        if not isinstance(engine, RefitFromDisk):
            return ConfigError(f"{engine.name} does not load weights from a disk.")
        try:
            await engine.update_from_disk(self._path, version)
        except Exception as error:  # One engine's failure must not hide the others' results.
            return error
        return None
