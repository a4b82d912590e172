"""What a scheduler still holds when its run ends, for the summary."""

from __future__ import annotations

from aprilsched.core.records import group_lengths
from aprilsched.core.state import SchedulerState
from aprilsched.telemetry.summary import Remainder

__all__ = ["remainder"]


def remainder(state: SchedulerState) -> Remainder:
    """Rollouts in flight, counts, the ledger, and the lengths of what is still open."""
    book = state.book
    return Remainder(
        in_flight=list(book.rollouts),
        counters=book.counters,
        ledger=book.ledger,
        open_groups=[group_lengths(group) for group in book.training_groups()],
    )
