"""What a listener is: it is shown every event and every command, in order, and decides nothing."""

from __future__ import annotations

from typing import Protocol

from aprilsched.core.commands import Command
from aprilsched.core.events import Event

__all__ = ["Listener"]


class Listener(Protocol):
    """Sees a run. It is called between decisions, so it must return at once; what is slow belongs
    into a :class:`~aprilsched.telemetry.queued.QueuedListener`. One that raises is told no more."""

    def on_event(self, event: Event, now: float) -> None:
        """`event` was handled at `now`, seconds of the event loop's clock."""
        ...

    def on_command(self, command: Command, now: float) -> None:
        """`command` was decided at `now`."""
        ...
