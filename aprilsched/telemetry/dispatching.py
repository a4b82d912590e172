"""A listener that is a table: what each kind of event and command does to it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event, Progress
from aprilsched.telemetry.base import Chunks

__all__ = ["DispatchingListener"]


class DispatchingListener:
    """Calls `_handlers` by type, with `_now` set; what has no handler is passed over."""

    def __init__(self) -> None:
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {}

    @property
    def kinds(self) -> Collection[type]:
        """What it has handlers for."""
        return self._handlers.keys()

    def on_event(self, event: Event, now: float) -> None:
        self.hear(event, now)

    def on_command(self, command: Command, now: float) -> None:
        self.hear(command, now)

    def on_progress(self, chunks: Chunks, now: float) -> None:
        handler = self._handlers.get(Progress)
        if handler is not None:
            for event, at in chunks:
                self._now = at
                handler(event)
        self._now = now

    def hear(self, what: Event | Command, now: float) -> None:
        """Either of them."""
        self._now = now
        handler = self._handlers.get(type(what))
        if handler is not None:
            handler(what)
