"""What a listener is: it is given every fact of a run, in order, and decides nothing.

Most facts are chunks of tokens, which come by the thousand a second. A listener that need not hear
of each at once can be given many together, which costs a third: between two things that a
coordinator does, a listener's code is in no cache any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event
from aprilsched.core.messages.facts import Fact, TokensReceived

__all__ = ["AnyListener", "BulkListener", "Listener", "ProtocolListener", "TokenChunks"]

TokenChunks: TypeAlias = Sequence[tuple[TokensReceived, float]]
"""Each with its time."""


@runtime_checkable
class Listener(Protocol):
    """Hears the facts of a run (:mod:`aprilsched.core.messages.facts`).

    It is called between decisions, so it must return at once; what is slow belongs into a
    :class:`~aprilsched.telemetry.queued.QueuedListener`. One that raises is told no more. One with
    a true attribute ``wants_tokens`` makes facts hold the tokens themselves.
    """

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """These have come true at `now`, seconds of the event loop's clock, in this order."""
        ...


@runtime_checkable
class BulkListener(Listener, Protocol):
    """Is given chunks of tokens a moment later, many at once, and before whatever else happened
    after them."""

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        """What has come since the last call, in order; the last one at `now`."""
        ...


@runtime_checkable
class ProtocolListener(Protocol):
    """Sees the events that the core was given and the commands that it answered with: for tests of
    the shell, and for whoever looks for a bug in it. Everybody else listens to facts."""

    def on_event(self, event: Event, now: float) -> None:
        """`event` was handled at `now`, seconds of the event loop's clock."""
        ...

    def on_command(self, command: Command, now: float) -> None:
        """`command` was decided at `now`."""
        ...


AnyListener: TypeAlias = Listener | ProtocolListener
"""A listener of facts, of the protocol, or of both."""
