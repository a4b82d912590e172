"""The summary of a run: the listener that makes it, and what the scheduler adds at the end."""

from __future__ import annotations

from aprilsched.core.state.records import group_lengths
from aprilsched.core.state.state import SchedulerState
from aprilsched.runs.setup import Setup
from aprilsched.telemetry.summary import Remainder, Summary


def summary_of(setup: Setup) -> Summary:
    """The listener that sums up the run which `setup` describes."""
    return Summary(
        trainer_waits=setup.config.trainer_waits,
        bound=setup.bound,
        workload_mean=setup.workload_mean,
        burn_in=setup.settings.burn_in,
    )


def remainder(state: SchedulerState) -> Remainder:
    """What the scheduler still holds when its run ends.

    These are the rollouts in flight, the counters, the ledger, and the lengths in open groups.
    """
    in_flight = state.in_flight
    return Remainder(
        in_flight=list(in_flight.rollouts),
        counters=in_flight.counters,
        ledger=in_flight.ledger,
        open_groups=[group_lengths(group) for group in in_flight.training_groups()],
    )
