"""Decides how many groups are kept open for the batch in work, and how many groups it takes.

If a batch is full by tokens, the number of groups that it takes is estimated from the lengths seen
so far, where unfinished responses are censored. Until a response has finished, the estimate is
``batch_groups``.
"""

from __future__ import annotations

from aprilsched.kernel.core.lengths.observed import DEFAULT_WINDOW, GroupLengths
from aprilsched.kernel.core.state.records import group_lengths
from aprilsched.kernel.core.state.state import SchedulerState


def retarget(state: SchedulerState) -> None:
    """Decide how many groups are kept open for the next batch, which begins now, or again in the
    middle of a batch, because it may take more or fewer groups than was estimated."""
    state.plan.usual_group = _usual_group(state)
    state.plan.target_groups = state.plan.schedule.target_groups(state.batch_groups)


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
