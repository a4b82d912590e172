"""Decides how many groups are kept open for the batch in work, and how many groups it takes.

If tokens fill a batch, the number of groups that it takes is estimated from the lengths so far,
with unfinished responses censored. Until a response has finished, the estimate is ``batch_groups``.
"""

from __future__ import annotations

from aprilsched.kernel.core.lengths.observed import DEFAULT_WINDOW, GroupLengths
from aprilsched.kernel.core.state.records import group_lengths
from aprilsched.kernel.core.state.state import SchedulerState


def retarget(state: SchedulerState) -> None:
    """Decide how many groups are kept open for a batch.

    This happens when the batch starts, and again in the middle of it, because it may take more or
    fewer groups than estimated.
    """
    state.plan.usual_group = _usual_group(state)
    state.plan.target_groups = state.plan.schedule.target_groups(state.batch_groups)


def _usual_group(state: SchedulerState) -> float:
    """Return what one group is expected to count towards a batch."""
    size = state.prompts.usual_size

    def group_tokens() -> float | None:
        dist = state.expectations.observed.distribution(_newest(state))
        return None if dist is None else size * dist.mean()

    usual = state.stop.usual_group(size, group_tokens)
    return state.plan.usual_group if usual is None else usual


def _newest(state: SchedulerState) -> list[GroupLengths]:
    """Return the open groups that were launched last.

    About `DEFAULT_WINDOW` responses suffice, and a refilled pool needs the estimate often.
    """
    newest: list[GroupLengths] = []
    responses = 0
    for group in reversed(state.in_flight.groups.values()):
        if responses >= DEFAULT_WINDOW:
            break
        if group.evaluation_id is None and not group.complete:
            newest.append(group_lengths(group))
            responses += len(group.members)
    return newest[::-1]
