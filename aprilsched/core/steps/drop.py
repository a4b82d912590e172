"""Taking a group out of flight and into the ledger."""

from __future__ import annotations

from aprilsched.core.messages.commands import Abort, CancelWork, GiveUp
from aprilsched.core.messages.facts import (
    AttemptCalledBack,
    DroppedRollout,
    GroupDropped,
    GroupsFailed,
    PromptRefused,
)
from aprilsched.core.state.ledger import Reason
from aprilsched.core.state.records import GroupRecord, RequestRecord
from aprilsched.core.state.state import SchedulerState

__all__ = ["abort", "drop", "refuse"]

_FAILURES = frozenset(
    {Reason.BAD_PROMPT, Reason.FAILED, Reason.REWARD_FAILED, Reason.EPISODE_FAILED}
)


def abort(state: SchedulerState, request: RequestRecord) -> None:
    """Call an open attempt back, once."""
    if not request.aborting:
        state.in_flight.call_back(request)
        state.tell(AttemptCalledBack(request_id=request.request_id))
        state.commands.append(
            Abort(engine=request.engine, request_id=request.request_id, attempt=request.attempt)
        )


def drop(
    state: SchedulerState,
    group: GroupRecord,
    reason: Reason,
    cause: str,
    *,
    culprit: int | None = None,
) -> None:
    """Drop a whole group; `culprit` is the rollout whose failure took its siblings along."""
    for member in group.members:
        if member.request is not None and member.request.open:
            abort(state, member.request)
    if group.evaluation_id is None and not group.complete:
        state.note_lengths(group)
    entries = state.in_flight.drop(group, reason, cause, culprit=culprit, now=state.now)
    state.tell(
        GroupDropped(
            group_id=group.group_id,
            reason=reason.value,
            cause=cause,
            rollouts=tuple(
                DroppedRollout(
                    rollout_id=entry.rollout_id, reason=entry.reason.value, tokens=entry.tokens
                )
                for entry in entries
            ),
            culprit=culprit,
        )
    )
    state.commands.append(
        CancelWork(
            group_id=group.group_id,
            rollout_ids=tuple(member.rollout_id for member in group.members),
            reason=str(reason),
            cause=cause,
            culprit=culprit,
        )
    )
    if reason in _FAILURES:
        _count_failure(state, cause)


def refuse(state: SchedulerState, cause: str) -> None:
    """A prompt of the source cannot be used. A source of none but such prompts ends the run."""
    entry = state.in_flight.refuse(Reason.BAD_PROMPT, cause, now=state.now)
    state.tell(PromptRefused(rollout_id=entry.rollout_id, group_id=entry.group_id, cause=cause))
    state.commands.append(
        CancelWork(
            group_id=entry.group_id,
            rollout_ids=(entry.rollout_id,),
            reason=str(entry.reason),
            cause=cause,
        )
    )
    _count_failure(state, cause)


def _count_failure(state: SchedulerState, cause: str) -> None:
    """A reward that always raises would eat every prompt while the trainer waits for ever."""
    state.prompts.consecutive_failures += 1
    if state.prompts.consecutive_failures == state.config.max_failed_groups:
        state.tell(GroupsFailed(groups=state.prompts.consecutive_failures, cause=cause))
        state.commands.append(GiveUp(groups=state.prompts.consecutive_failures, cause=cause))
