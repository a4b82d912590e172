"""The listeners of a run: told of everything that happens, and kept from doing it harm.

- One that raises is told nothing more. The run goes on, and it is said once, with where it raised.
- One that holds the event loop up is named once: while it is at work nothing is read, sent or
  decided.
- An :class:`~aprilsched.errors.InvariantViolation` is no mistake of the listener. It is one of the
  scheduler, which a listener that checks it has found, and it ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from aprilsched.core.commands import Command
from aprilsched.core.events import Event
from aprilsched.errors import InvariantViolation
from aprilsched.telemetry.base import Listener

__all__ = ["Listeners"]

log = logging.getLogger("aprilsched")

_LONG_CALL_S = 0.01
"""A call that is shorter is not counted: ten thousand tokens are encoded in it."""
_TOO_LONG_S = 1.0
_TOO_MUCH = 0.05
"""Of the run's time, in calls that are counted."""


_Calls: TypeAlias = tuple[tuple[Listener, Callable[[Any, float], None]], ...]


class Listeners:
    """Passes events and commands on, in order."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._on_event: _Calls = tuple((each, each.on_event) for each in listeners)
        self._on_command: _Calls = tuple((each, each.on_command) for each in listeners)
        self._began: float | None = None
        self._seconds: dict[int, float] = {}
        """In long calls, by the listener's id."""
        self._named: set[int] = set()

    def event(self, event: Event, now: float) -> None:
        """`event` was handled."""
        self._tell(self._on_event, event, now)

    def command(self, command: Command, now: float) -> None:
        """`command` was decided."""
        self._tell(self._on_command, command, now)

    def _tell(self, calls: _Calls, what: Event | Command, now: float) -> None:
        if self._began is None:
            self._began = now
        before = time.perf_counter()
        for listener, call in calls:
            try:
                call(what, now)
            except InvariantViolation:
                raise
            except Exception as error:
                self._detach(listener, error)
            after = time.perf_counter()
            if after - before > _LONG_CALL_S:
                self._count(listener, after - before, now - self._began)
            before = after

    def _detach(self, listener: Listener, error: Exception) -> None:
        self._on_event = tuple(each for each in self._on_event if each[0] is not listener)
        self._on_command = tuple(each for each in self._on_command if each[0] is not listener)
        log.error(
            "the listener %s raised and is told nothing more, the run goes on: %r",
            _name(listener),
            error,
            exc_info=error,
        )

    def _count(self, listener: Listener, seconds: float, elapsed: float) -> None:
        total = self._seconds[id(listener)] = self._seconds.get(id(listener), 0.0) + seconds
        # Of the run's own clock: on a virtual one nothing is held up.
        much = total >= _TOO_LONG_S and total > _TOO_MUCH * elapsed
        if (much or seconds >= _TOO_LONG_S) and id(listener) not in self._named:
            self._named.add(id(listener))
            log.warning(
                "the listener %s has held the event loop up for %.1f s, in which nothing could "
                "be read or sent; wrap it in aprilsched.telemetry.queued.QueuedListener.",
                _name(listener),
                total,
            )


def _name(listener: Listener) -> str:
    kind = type(listener)
    return f"{kind.__module__}.{kind.__qualname__}"
