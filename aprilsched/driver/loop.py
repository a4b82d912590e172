"""The heart of the shell: events go into the core one at a time, commands go to who does them.

Everything runs on one thread, so the core needs no lock; an event that comes up while another is
handled waits its turn in the inbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event, Tick
from aprilsched.core.scheduler import Scheduler
from aprilsched.driver.listeners import Listeners
from aprilsched.telemetry.base import AnyListener

__all__ = ["EventLoop", "Perform"]

Perform = Callable[[Any], None]
"""Starts what a command asks for; returns at once."""


class EventLoop:
    """Feeds the core, tells the listeners, carries commands out; `clock` says the time."""

    def __init__(
        self, core: Scheduler, listeners: Sequence[AnyListener], *, clock: Callable[[], float]
    ) -> None:
        self.core = core
        self._clock = clock
        self.performers: dict[type[Command], Perform] = {}
        self._listeners = Listeners(listeners)
        self._inbox: deque[Event] = deque()
        self._busy = False
        self._stopped = False

    def stop(self) -> None:
        """Decide nothing any more: what happens while closing must not pause an engine again."""
        self._stopped = True
        self._listeners.release()

    def feed(self, event: Event) -> None:
        """Something happened. Handled now, or right after the event in work.

        Raises:
            InvariantViolation: if it cannot have happened; a bug.
        """
        if self._stopped:
            return
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._busy = False

    def _handle(self, event: Event) -> None:
        now = self._clock()
        commands = self.core.handle(event, now)
        if isinstance(event, Tick):
            self._listeners.release()
        else:
            self._listeners.event(event, now)
        if self.core.facts:
            self._listeners.facts(self.core.facts, now)
        if commands:
            # A command may be carried out by what a listener has learnt from the tokens.
            self._listeners.release_tokens()
        for command in commands:
            self._listeners.command(command, now)
            self.performers[type(command)](command)
