"""The listeners of a run: told of everything that happens, and kept from doing it harm.

- One that raises is told nothing more. The run goes on, and it is said once, with where it raised.
- One that holds the event loop up is named once: while it is at work nothing is read, sent or
  decided.
- Chunks of tokens are held for a moment for those that take many at once, and shown before anything
  that comes after them.
- An :class:`~aprilsched.errors.InvariantViolation` is no mistake of the listener. It is one of the
  scheduler, which a listener that checks it has found, and it ends the run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event, Progress
from aprilsched.core.messages.facts import Fact, TokensReceived, by_delivery
from aprilsched.driver.callbacks import called_now
from aprilsched.errors import InvariantViolation
from aprilsched.telemetry.base import (
    AnyListener,
    BulkFactListener,
    BulkListener,
    FactListener,
    Listener,
)

__all__ = ["Listeners"]

log = logging.getLogger("aprilsched")

_LISTENER = "the listener"
_LONG_CALL_S = 0.01
"""A call that is shorter is not counted: ten thousand tokens are encoded in it."""
_TOO_LONG_S = 1.0
_TOO_MUCH = 0.05
"""Of the run's time, in calls that are counted."""
_HELD_S = 0.25
_HELD_CHUNKS = 256


_Calls: TypeAlias = tuple[tuple[AnyListener, Callable[[Any, float], None]], ...]


class Listeners:
    """Passes events and commands on, in order."""

    def __init__(self, listeners: Sequence[AnyListener]) -> None:
        watching = [each for each in listeners if isinstance(each, Listener)]
        self._on_event: _Calls = tuple((each, each.on_event) for each in watching)
        self._on_command: _Calls = tuple((each, each.on_command) for each in watching)
        self._on_chunk: _Calls = tuple(
            (each, each.on_event) for each in watching if not isinstance(each, BulkListener)
        )
        self._on_chunks: _Calls = tuple(
            (each, each.on_progress) for each in listeners if isinstance(each, BulkListener)
        )
        self._on_facts: _Calls = tuple(
            (each, each.on_facts) for each in listeners if isinstance(each, FactListener)
        )
        self._on_fact_chunk: _Calls = tuple(
            (each, each.on_facts)
            for each in listeners
            if isinstance(each, FactListener) and not isinstance(each, BulkFactListener)
        )
        self._on_tokens: _Calls = tuple(
            (each, each.on_tokens) for each in listeners if isinstance(each, BulkFactListener)
        )
        self._held_tokens: list[tuple[TokensReceived, float]] = []
        self._release_tokens_at = -math.inf
        self._held: list[tuple[Progress, float]] = []
        self._release_at = -math.inf
        self._began: float | None = None
        self._seconds: dict[int, float] = {}
        """In long calls, by the listener's id."""
        self._named: set[int] = set()

    def facts(self, facts: Sequence[Fact], now: float) -> None:
        """These have come true, in this order."""
        first = facts[0]
        if first.__class__ is TokensReceived and len(facts) == 1:
            if self._on_fact_chunk:
                self._tell(self._on_fact_chunk, facts, now)
            if self._on_tokens:
                self._held_tokens.append((cast("TokensReceived", first), now))
                if now >= self._release_tokens_at or len(self._held_tokens) >= _HELD_CHUNKS:
                    self.release_tokens()
            return
        if self._held_tokens:
            self.release_tokens()
        for part in by_delivery(facts):
            self._tell(self._on_facts, part, now)

    def release_tokens(self) -> None:
        """Show the chunks of tokens that are held."""
        if self._held_tokens:
            held, self._held_tokens = self._held_tokens, []
            now = held[-1][1]
            self._release_tokens_at = now + _HELD_S
            self._tell(self._on_tokens, held, now)

    def event(self, event: Event, now: float) -> None:
        """`event` was handled."""
        if isinstance(event, Progress):
            if self._on_chunk:
                self._tell(self._on_chunk, event, now)
            if self._on_chunks:
                self._held.append((event, now))
                if now >= self._release_at or len(self._held) >= _HELD_CHUNKS:
                    self.release()
        else:
            if self._held:
                self.release()
            self._tell(self._on_event, event, now)

    def command(self, command: Command, now: float) -> None:
        """`command` was decided."""
        if self._held:
            self.release()
        self._tell(self._on_command, command, now)

    def release(self) -> None:
        """Show what is held."""
        self.release_tokens()
        if self._held:
            held, self._held = self._held, []
            now = held[-1][1]
            self._release_at = now + _HELD_S
            self._tell(self._on_chunks, held, now)

    def _tell(self, calls: _Calls, what: object, now: float) -> None:
        if self._began is None:
            self._began = now
        before = time.perf_counter()
        for listener, call in calls:
            try:
                called_now(_LISTENER, call, what, now)
            except InvariantViolation:
                raise
            except Exception as error:
                self._detach(listener, error)
            after = time.perf_counter()
            if after - before > _LONG_CALL_S:
                self._count(listener, after - before, now - self._began)
            before = after

    def _detach(self, listener: AnyListener, error: Exception) -> None:
        self._on_event = _without(self._on_event, listener)
        self._on_command = _without(self._on_command, listener)
        self._on_chunk = _without(self._on_chunk, listener)
        self._on_chunks = _without(self._on_chunks, listener)
        self._on_facts = _without(self._on_facts, listener)
        self._on_fact_chunk = _without(self._on_fact_chunk, listener)
        self._on_tokens = _without(self._on_tokens, listener)
        log.error(
            "the listener %s raised and is told nothing more, the run goes on: %r",
            _name(listener),
            error,
            exc_info=error,
        )

    def _count(self, listener: AnyListener, seconds: float, elapsed: float) -> None:
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


def _without(calls: _Calls, listener: AnyListener) -> _Calls:
    return tuple(each for each in calls if each[0] is not listener)


def _name(listener: AnyListener) -> str:
    kind = type(listener)
    return f"{kind.__module__}.{kind.__qualname__}"
