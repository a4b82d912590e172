"""The engines of a fleet, opened together or not at all, and who joined and left since.

- Whoever joins is open and of the fleet's model before anybody hears of it.
- Whoever left stays open for the reader of the change, who closes it when it has been handed back.
- The names are unique at any time, and the fleet is never empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aprilsched.engines.base import FleetChange
from aprilsched.engines.sglang.agreement import check_fleet, check_joiner
from aprilsched.engines.sglang.engine import SGLangEngine
from aprilsched.errors import ConfigError

__all__ = ["Members"]


class Members:
    """Engines by name; belongs to one event loop from :meth:`open` to :meth:`close`."""

    def __init__(self, engines: Sequence[SGLangEngine], model_path: str | None) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._model_path = model_path
        self._joined: dict[str, SGLangEngine] = {}
        self._left: list[str] = []
        self._departed: list[SGLangEngine] = []
        self._changed = asyncio.Event()

    @property
    def engines(self) -> tuple[SGLangEngine, ...]:
        """In the order in which they came."""
        return tuple(self._engines.values())

    async def open(self) -> None:
        """Open every engine and check that they agree; closes all if anything is wrong."""
        self._joined, self._left, self._changed = {}, [], asyncio.Event()
        try:
            outcomes = await asyncio.gather(
                *(engine.open() for engine in self.engines), return_exceptions=True
            )
            failures = [outcome for outcome in outcomes if outcome is not None]
            for other in failures[1:]:
                failures[0].add_note(f"also {other}")
            if failures:
                raise failures[0]
            check_fleet(self.engines, self._model_path)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close every engine, those that left included."""
        await asyncio.gather(*(engine.close() for engine in (*self.engines, *self._departed)))
        self._departed = []

    async def join(self, engine: SGLangEngine) -> None:
        """Open `engine` and take it in.

        Raises:
            EngineError: if it cannot be reached or is no SGLang.
            ConfigError: if it serves another model, or is there already.
        """
        try:
            self._check_new(engine)
            await engine.open()
            self._check_new(engine)
            check_joiner(self.engines[0], engine)
        except BaseException:
            await engine.close()
            raise
        self._engines[engine.name] = self._joined[engine.name] = engine
        self._changed.set()

    def leave(self, name: str) -> None:
        """Give `name` up.

        Raises:
            ConfigError: if it is unknown, or the last one.
        """
        if name not in self._engines:
            raise ConfigError(f"{name} is not in the fleet of {', '.join(self._engines)}.")
        if len(self._engines) == 1:
            raise ConfigError(f"{name} is the last server of the fleet; add another one first.")
        self._departed.append(self._engines.pop(name))
        if self._joined.pop(name, None) is None:
            self._left.append(name)
        self._changed.set()

    async def changed(self) -> None:
        """Wait until :meth:`take` has something to give."""
        await self._changed.wait()

    def take(self) -> FleetChange | None:
        """What happened since this was last asked; None if it is nothing."""
        self._changed.clear()
        if not self._left and not self._joined:
            return None
        change = FleetChange(left=tuple(self._left), joined=tuple(self._joined.values()))
        self._left, self._joined = [], {}
        return change

    def _check_new(self, engine: SGLangEngine) -> None:
        if engine.name in self._engines:
            raise ConfigError(f"The server {engine.name} is in the fleet already.")
