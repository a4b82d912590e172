"""What listeners of a resumed run see: its time goes on where the former process stopped.

Invariant: nothing is shown before :meth:`Onward.begin`, so that the former part can be shown first;
the time between two processes is not there at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.telemetry.base import Listener

__all__ = ["Onward"]


class Onward:
    """Stands before `listeners`."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)
        self._held: list[tuple[Event | None, Command | None, float]] = []
        self._from: float | None = None
        self._first: float | None = None
        """The first time that is shown."""

    def on_event(self, event: Event, now: float) -> None:
        self._take(event, None, now)

    def on_command(self, command: Command, now: float) -> None:
        self._take(None, command, now)

    def begin(self, at: float) -> None:
        """The former part is over, `at` seconds after the run's begin: show what was held."""
        self._from = at
        held, self._held = self._held, []
        for event, command, now in held:
            self._take(event, command, now)

    def _take(self, event: Event | None, command: Command | None, now: float) -> None:
        if self._from is None:
            self._held.append((event, command, now))
            return
        if self._first is None:
            self._first = now
        at = now - self._first + self._from
        for listener in self._listeners:
            if event is not None:
                listener.on_event(event, at)
            if command is not None:
                listener.on_command(command, at)
