"""Notifies a run's listeners of all events and commands, and protects the run from their errors.

- A listener that raises is not called again. The run continues, and the error is logged once with
  its traceback.
- A listener of the user that blocks the event loop for long is named once in the log, because
  nothing is read, sent or decided while it runs. Listeners of the library are not named: users
  cannot wrap them, and the cause of the delay is a busy machine.
- For listeners that take many chunks at once, chunks of tokens are held for a moment. They are
  passed on before any later event or command.
- An :class:`~aprilsched.errors.InvariantViolation` is not a mistake of the listener but of the
  scheduler, found by a listener that checks it. It ends the run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.messages.commands import Command
from aprilsched.kernel.core.messages.events import Event
from aprilsched.kernel.core.messages.facts import Fact, TokensReceived
from aprilsched.kernel.shell.callbacks import ordinary
from aprilsched.kernel.shell.listener import AnyListener, BulkListener, Listener, ProtocolListener

log = logging.getLogger("aprilsched")

_LISTENER = "the listener"
_LONG_CALL_S = 0.01
"""Shorter calls are not counted. In this time ten thousand tokens can be encoded."""
_TOO_LONG_S = 1.0
"""Seconds in counted calls below which a listener is never named."""
_TOO_MUCH = 0.05
"""Share of the run's time that a listener may spend in counted calls."""
_HELD_S = 0.25
"""Seconds for which chunks of tokens are held at most, while chunks arrive."""
_HELD_CHUNKS = 256
"""Number of chunks that are held at most."""


_Calls: TypeAlias = tuple[tuple[AnyListener, Callable[[Any, float], None]], ...]


class Listeners:
    """Passes facts on in order, and events and commands to those that watch the protocol."""

    def __init__(self, listeners: Sequence[AnyListener]) -> None:
        hearing = [each for each in listeners if isinstance(each, Listener)]
        watching = [each for each in listeners if isinstance(each, ProtocolListener)]
        self._on_facts: _Calls = tuple((each, each.on_facts) for each in hearing)
        self._on_chunk: _Calls = tuple(
            (each, each.on_facts) for each in hearing if not isinstance(each, BulkListener)
        )
        self._on_tokens: _Calls = tuple(
            (each, each.on_tokens) for each in hearing if isinstance(each, BulkListener)
        )
        self.watch_protocol = bool(watching)
        """Whether any listener takes events and commands."""
        self._on_event: _Calls = tuple((each, each.on_event) for each in watching)
        self._on_command: _Calls = tuple((each, each.on_command) for each in watching)
        self._held: list[tuple[TokensReceived, float]] = []
        """Chunks for those that take many at once."""
        self._release_at = -math.inf
        self._began: float | None = None
        self._detached: set[int] = set()
        """Those that have raised, by their identity."""
        self._seconds: dict[int, float] = {}
        """Seconds that each listener spent in long calls, by its id."""
        self._named: set[int] = set()

    def facts(self, facts: Sequence[Fact], now: float) -> None:
        """Pass on facts that became true, in this order."""
        first = facts[0]
        if first.__class__ is TokensReceived and len(facts) == 1:
            if self._on_chunk:
                self._tell(self._on_chunk, facts, now)
            if self._on_tokens:
                self._held.append((cast("TokensReceived", first), now))
                if now >= self._release_at or len(self._held) >= _HELD_CHUNKS:
                    self.release()
            return
        if self._held:
            self.release()
        self._tell(self._on_facts, facts, now)

    def event(self, event: Event, now: float) -> None:
        """Pass on an event that the core has handled."""
        self._tell(self._on_event, event, now)

    def command(self, command: Command, now: float) -> None:
        """Pass on a command that the core has decided."""
        self._tell(self._on_command, command, now)

    def release(self) -> None:
        """Pass on the chunks of tokens that are held."""
        if self._held:
            held, self._held = self._held, []
            now = held[-1][1]
            self._release_at = now + _HELD_S
            self._tell(self._on_tokens, held, now)

    def _tell(self, calls: _Calls, what: object, now: float) -> None:
        if self._began is None:
            self._began = now
        before = time.perf_counter()
        for listener, call in calls:
            if self._detached and id(listener) in self._detached:
                continue
            try:
                call(what, now)
            except (InvariantViolation, KeyboardInterrupt):
                raise
            except BaseException as error:
                self._detach(listener, ordinary(_LISTENER, error))
            after = time.perf_counter()
            if after - before > _LONG_CALL_S and not _ours(listener):
                self._count(listener, after - before, now - self._began)
            before = after

    def _detach(self, listener: AnyListener, error: Exception) -> None:
        self._detached.add(id(listener))
        log.error(
            "the listener %s raised and is left out from now on, the run continues: %r",
            _name(listener),
            error,
            exc_info=error,
        )

    def _count(self, listener: AnyListener, seconds: float, elapsed: float) -> None:
        total = self._seconds[id(listener)] = self._seconds.get(id(listener), 0.0) + seconds
        # `elapsed` is on the run's own clock, which may be virtual.
        much = total >= _TOO_LONG_S and total > _TOO_MUCH * elapsed
        if (much or seconds >= _TOO_LONG_S) and id(listener) not in self._named:
            self._named.add(id(listener))
            log.warning(
                "the listener %s has held the event loop up for %.1f s, in which nothing could "
                "be read or sent; wrap it in aprilsched.observe.queued.QueuedListener.",
                _name(listener),
                total,
            )


def _ours(listener: AnyListener) -> bool:
    return type(listener).__module__.startswith("aprilsched.")


def _name(listener: AnyListener) -> str:
    kind = type(listener)
    return f"{kind.__module__}.{kind.__qualname__}"
