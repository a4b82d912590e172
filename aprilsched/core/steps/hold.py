"""Holds the engines for a trainer that pauses and continues them by calls of its own, and drops the
groups that nobody wants any more. The gateway asks for both.

A held fleet is paused like one whose batch is full: requests wait inside the engines where the
straggler policy lets them (``retract``, ``in_place``, ``choose``), are called back (``abort``), or
run to their end (``run``). Running evaluations end first. An update that comes meanwhile is carried
out, and the engines stay paused after it.
"""

from __future__ import annotations

from aprilsched.core.messages.events import GroupWithdrawn, HoldEnded, HoldRequested
from aprilsched.core.state.ledger import Reason
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.drop import drop

__all__ = ["on_group_withdrawn", "on_hold_ended", "on_hold_requested"]


def on_hold_requested(state: SchedulerState, _: HoldRequested) -> None:
    state.fleet.held = True


def on_hold_ended(state: SchedulerState, _: HoldEnded) -> None:
    state.fleet.held = False


def on_group_withdrawn(state: SchedulerState, event: GroupWithdrawn) -> None:
    group = state.in_flight.groups.get(event.group_id)
    if group is not None and group.evaluation_id is None and not group.offered:
        drop(state, group, Reason.WITHDRAWN, event.cause)
