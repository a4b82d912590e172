"""Decides how many groups are kept open for the present batch, and how many a batch takes.

If a batch is full by tokens, the number of groups that it takes is estimated from the lengths seen
so far, where unfinished responses are censored. Until a response has finished, the estimate is
``batch_groups``.
"""

from __future__ import annotations

from aprilsched.core.lengths.groups import GroupLengths
from aprilsched.core.lengths.observed import DEFAULT_WINDOW
from aprilsched.core.policies.over_provision import PoolLoad
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.wave import Wave
from aprilsched.core.state.records import group_lengths
from aprilsched.core.state.state import SchedulerState

__all__ = ["refill_now", "resize", "retarget"]


def retarget(state: SchedulerState) -> None:
    """Decide how many groups are kept open for the next batch, which begins now."""
    in_flight, capacity = state.in_flight, state.fleet.control.kv_tokens
    _aim(state, None if capacity is None else in_flight.peak_tokens / capacity)
    in_flight.peak_tokens = in_flight.held_tokens


def resize(state: SchedulerState) -> None:
    """Decide again in the middle of a batch, because it may take more or fewer groups than was
    estimated."""
    _aim(state, None)


def _aim(state: SchedulerState, kv_share: float | None) -> None:
    state.plan.usual_group = _usual_group(state)
    batch_groups = state.batch_groups
    target = state.plan.schedule.over_provision.target_groups(
        PoolLoad(batch_groups=batch_groups, current=state.plan.target_groups, kv_share=kv_share)
    )
    if state.start_up.lasts(state.begun):
        target = state.start_up.target_groups(state.begun, batch_groups=batch_groups, target=target)
    state.plan.target_groups = target


def _usual_group(state: SchedulerState) -> float:
    """What one group is expected to count towards a batch."""
    size = state.prompts.usual_size

    def group_tokens() -> float | None:
        law = state.expectations.observed.law(_newest(state))
        return None if law is None else size * law.mean()

    usual = state.stop.usual_group(size, group_tokens)
    return state.plan.usual_group if usual is None else usual


def _newest(state: SchedulerState) -> list[GroupLengths]:
    """The open groups that were launched last. The estimate is of so many responses, and a pool
    that is refilled asks for it all the time."""
    newest: list[GroupLengths] = []
    responses = 0
    for group in reversed(state.in_flight.groups.values()):
        if responses >= DEFAULT_WINDOW:
            break
        if group.evaluation_id is None and not group.complete:
            newest.append(group_lengths(group))
            responses += len(group.members)
    return newest[::-1]


def refill_now(state: SchedulerState) -> Refill:
    """The refill rule in force. While the run starts up it is a wave, because a pool would not wait
    for the first batches."""
    if state.start_up.lasts(state.begun):
        return Wave()
    return state.plan.schedule.refill
