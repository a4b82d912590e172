"""What a listener is: it is shown every event and every command, in order, and decides nothing.

Most events are chunks of tokens, which come by the thousand a second. A listener that needs not
hear of each at once can be told of many together, which costs a third: between two things that a
coordinator does, a listener's code is in no cache any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.events import Event, Progress
from aprilsched.core.messages.facts import Fact, TokensReceived

__all__ = [
    "AnyListener",
    "BulkFactListener",
    "BulkListener",
    "Chunks",
    "FactListener",
    "Listener",
    "TokenChunks",
]

Chunks: TypeAlias = Sequence[tuple[Progress, float]]
"""Each with the time at which it was handled."""

TokenChunks: TypeAlias = Sequence[tuple[TokensReceived, float]]
"""Each with its time."""


@runtime_checkable
class FactListener(Protocol):
    """Sees the facts of a run (:mod:`aprilsched.core.messages.facts`). It is called between
    decisions, so it must return at once. One that raises is told no more."""

    def on_facts(self, facts: Sequence[Fact], now: float) -> None:
        """These have come true at `now`, seconds of the event loop's clock, in this order."""
        ...


@runtime_checkable
class BulkFactListener(FactListener, Protocol):
    """Is told of chunks of tokens a moment later, many at once, and before whatever else happened
    after them."""

    def on_tokens(self, chunks: TokenChunks, now: float) -> None:
        """What came since the last call, in order; the last one at `now`."""
        ...


@runtime_checkable
class Listener(Protocol):
    """Sees a run. It is called between decisions, so it must return at once; what is slow belongs
    into a :class:`~aprilsched.telemetry.queued.QueuedListener`. One that raises is told no more."""

    def on_event(self, event: Event, now: float) -> None:
        """`event` was handled at `now`, seconds of the event loop's clock."""
        ...

    def on_command(self, command: Command, now: float) -> None:
        """`command` was decided at `now`."""
        ...


@runtime_checkable
class BulkListener(Listener, Protocol):
    """Is told of chunks of tokens a moment later, and before whatever else happened after them."""

    def on_progress(self, chunks: Chunks, now: float) -> None:
        """What came since the last call, in order; the last one at `now`."""
        ...


AnyListener: TypeAlias = FactListener | Listener
"""A listener of facts, of the protocol, or of both."""
