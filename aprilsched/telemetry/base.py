"""The protocols of listeners, which are given every fact of a run in order and decide nothing.

Most facts are chunks of tokens, of which thousands arrive in a second. A listener that does not
need each of them at once can take many together. This costs a third, because the listener's code
leaves the processor's caches between two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.core.messages.facts import Fact, TokensReceived

__all__ = ["AnyListener", "BulkListener", "Listener", "ProtocolListener", "TokenChunks"]

TokenChunks: TypeAlias = Sequence[tuple[TokensReceived, float]]
"""Facts about new tokens, each with its time."""


@runtime_checkable
class Listener(Protocol):
    """Is given the facts of a run (:mod:`aprilsched.core.messages.facts`).

    A listener is called between decisions, so it must return at once. Put a slow one into a
    :class:`~aprilsched.telemetry.queued.QueuedListener`. A listener that raises is not called
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
