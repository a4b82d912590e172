"""A listener that is a table: what each kind of fact does to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from aprilsched.core.messages.facts import Fact, TokensReceived
from aprilsched.telemetry.base import TokenChunks

__all__ = ["DispatchingListener"]


class DispatchingListener:
    """Calls `_handlers` by type, with `_now` set; what has no handler is passed over."""

    def __init__(self) -> None:
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {}

    @property
    def kinds(self) -> Collection[type]:
        """The facts that it has handlers for."""
        return self._handlers.keys()

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        self._now = now
        for fact in facts:
            handler = self._handlers.get(fact.__class__)
            if handler is not None:
                handler(fact)

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        handler = self._handlers.get(TokensReceived)
        if handler is not None:
            for fact, at in chunks:
                self._now = at
                handler(fact)
        self._now = now

    def hear(self, fact: Fact, now: float) -> None:
        """A single fact."""
        self._now = now
        handler = self._handlers.get(fact.__class__)
        if handler is not None:
            handler(fact)
