"""The loop of both shells: it feeds events to the core and passes its commands to performers.

Everything runs on one thread, so the core needs no lock. An event that arrives while another is
handled waits in the inbox.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from aprilsched.kernel.core.messages.commands import Command
from aprilsched.kernel.core.messages.events import Event, LoadSeen, Tick, VersionSeen
from aprilsched.kernel.core.messages.facts import by_delivery
from aprilsched.kernel.core.scheduler import Scheduler
from aprilsched.kernel.shell.listener import AnyListener
from aprilsched.kernel.shell.notify import Listeners

Perform = Callable[[Any], None]
"""Function that starts what a command asks for, and returns at once."""


_UNHEARD = (LoadSeen, VersionSeen)
"""Events of every second that no listener sees."""


class EventLoop:
    """Feeds the core, notifies the listeners, and has commands executed; `clock` gives the time."""

    def __init__(
        self, core: Scheduler, listeners: Sequence[AnyListener], *, clock: Callable[[], float]
    ) -> None:
        self.core = core
        self._clock = clock
        self.performers: dict[type[Command], Perform] = {}
        self._listeners = Listeners(listeners)
        core.state.tells_tokens = any(getattr(each, "wants_tokens", False) for each in listeners)
        self._inbox: deque[Event] = deque()
        self._busy = False
        self._held = False
        self._stopped = False

    def stop(self) -> None:
        """Ignore all further events, so that nothing pauses an engine again during close()."""
        self._stopped = True
        self._listeners.release()

    def feed(self, event: Event) -> None:
        """Handle an event now, or right after the event that is being handled.

        Raises:
            InvariantViolation: if the event is impossible, which is a bug.
        """
        if self._stopped:
            return
        self._inbox.append(event)
        if not (self._busy or self._held):
            self._drain()

    def hold(self) -> None:
        """Keep events in the inbox until :meth:`release`."""
        self._held = True

    def release(self, first: Event | None = None) -> None:
        """Handle `first`, if it is given, and then the events that were held."""
        self._held = False
        if self._stopped:
            return
        if first is not None:
            self._inbox.appendleft(first)
        if not self._busy:
            self._drain()

    def _drain(self) -> None:
        self._busy = True
        try:
            while self._inbox:
                self._handle(self._inbox.popleft())
        finally:
            self._busy = False

    def _handle(self, event: Event) -> None:
        now = self._clock()
        commands = self.core.handle(event, now)
        listeners, kind = self._listeners, event.__class__
        if kind is Tick:
            listeners.release()
        elif listeners.watch_protocol and kind not in _UNHEARD:
            listeners.event(event, now)
        facts = self.core.state.out.facts
        if len(facts) == 1:
            listeners.facts(facts, now)
        else:
            for part in by_delivery(facts):
                listeners.facts(part, now)
        if commands:
            # A listener may have to know the tokens before a command is carried out.
            listeners.release()
            for command in commands:
                if listeners.watch_protocol:
                    listeners.command(command, now)
                self.performers[command.__class__](command)
