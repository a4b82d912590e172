"""What a scheduler still holds when its run ends, for the summary."""

from __future__ import annotations

from aprilsched.core.state.records import group_lengths
from aprilsched.core.state.state import SchedulerState
from aprilsched.telemetry.summary import Remainder

__all__ = ["remainder"]


def remainder(state: SchedulerState) -> Remainder:
    """Rollouts in flight, counts, the ledger, and the lengths of what is still open."""
    in_flight = state.in_flight
    return Remainder(
        in_flight=list(in_flight.rollouts),
        counters=in_flight.counters,
        ledger=in_flight.ledger,
        open_groups=[group_lengths(group) for group in in_flight.training_groups()],
    )
