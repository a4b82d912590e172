"""Tells listeners a run that a test writes as events and commands, which is the shortest form.

They are translated to facts as those of an old event log are: an event together with the commands
that follow it at the same time. A test may leave out the call that an event confirms.
"""

from __future__ import annotations

from collections.abc import Sequence

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.core.messages.facts import Fact
from aprilsched.telemetry.base import Listener
from aprilsched.telemetry.event_log.version_1 import Protocol1

__all__ = ["Told"]


class Told:
    """Translates events and commands to facts, and tells them to `listeners`."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners
        self._protocol = Protocol1(self._show)

    def tell(self, what: Event | Command, now: float) -> None:
        for call in _calls_before(what):
            self._take(call, now)
        self._take(what, now)

    def flush(self) -> None:
        """Pass on the last event, to which no more commands belong."""
        self._protocol.flush()

    def _take(self, what: Event | Command, now: float) -> None:
        if type(what).__module__ == ev.__name__:
            self._protocol.event(what, now)  # type: ignore[arg-type]
        else:
            self._protocol.command(what, now)  # type: ignore[arg-type]

    def _show(self, facts: Sequence[Fact], now: float) -> None:
        for listener in self._listeners:
            listener.on_facts(facts, now)


def _calls_before(what: Event | Command) -> Sequence[Event | Command]:
    match what:
        case ev.Continued():
            return (ev.Paused(engine=what.engine), do.Continue(engine=what.engine))
        case ev.Flushed():
            return (ev.Paused(engine=what.engine), do.Flush(engine=what.engine))
        case do.Refit() if not what.adapter:
            return [ev.Paused(engine=engine) for engine in what.engines]
        case ev.Woken():
            released = ev.Released(engine=what.engine, tags=what.tags)
            return (released, do.Wake(engine=what.engine, tags=what.tags))
        case _:
            return ()
