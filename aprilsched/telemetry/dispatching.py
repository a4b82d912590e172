"""A base class for listeners that handle each kind of fact by a function of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from aprilsched.core.messages.facts import Fact, TokensReceived
from aprilsched.telemetry.base import TokenChunks

__all__ = ["DispatchingListener"]


class DispatchingListener:
    """Calls the handler of each fact in `_handlers`, with `_now` set; other facts are ignored."""

    def __init__(self) -> None:
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {}

    @property
    def kinds(self) -> Collection[type]:
        """The kinds of facts that have a handler."""
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
        """Take a single fact."""
        self._now = now
        handler = self._handlers.get(fact.__class__)
        if handler is not None:
            handler(fact)
