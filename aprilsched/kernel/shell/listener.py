"""The protocols of listeners, which are given every fact of a run in order and decide nothing.

Most facts are chunks of tokens, of which thousands arrive in a second. A listener that does not
need each of them at once can take many together. This costs a third, because the listener's code
leaves the processor's caches between two calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from aprilsched.kernel.core.messages.commands import Command
from aprilsched.kernel.core.messages.events import Event
from aprilsched.kernel.core.messages.facts import Fact, TokensReceived

TokenChunks: TypeAlias = Sequence[tuple[TokensReceived, float]]
"""Facts about new tokens, each with its time."""


@runtime_checkable
class Listener(Protocol):
    """Is given the facts of a run (:mod:`aprilsched.kernel.core.messages.facts`).

    A listener is called between decisions, so it must return at once. Put a slow one into a
    :class:`~aprilsched.observe.queued.QueuedListener`. A listener that raises is not called
    again. If a listener has a true attribute ``wants_tokens``, facts have the tokens themselves.
    """

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """Take the facts that came true at `now` (seconds on the event loop's clock), in order."""
        ...


@runtime_checkable
class BulkListener(Listener, Protocol):
    """A listener that takes many chunks of tokens at once. They are passed on a moment later, and
    before any other fact that came after them."""

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        """Take the chunks that arrived since the last call, in order; the last one arrived at
        `now`."""
        ...


@runtime_checkable
class ProtocolListener(Protocol):
    """Is given the events that the core handled and the commands that it answered with. This is
    meant for tests of the shell and for finding bugs in it; other listeners use facts."""

    def on_event(self, event: Event, now: float) -> None:
        """Take an event that was handled at `now` (seconds on the event loop's clock)."""
        ...

    def on_command(self, command: Command, now: float) -> None:
        """Take a command that was decided at `now`."""
        ...


AnyListener: TypeAlias = Listener | ProtocolListener
"""A listener of facts, of events and commands, or of both."""


# A base class for listeners that handle each kind of fact by a function of its own.


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
