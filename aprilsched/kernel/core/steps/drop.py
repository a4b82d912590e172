"""Gives up requests after too many attempts, and moves dropped groups to the ledger.

This is the only bound on the attempts of a request, and the last cause is kept. An attempt that
failed without a token may be the request's own fault, so a few in a row are enough to give it up
(``retries.attempts``). An attempt that broke off after new tokens, never reached its engine, or was
lost with its engine is probably not the request's fault. Such interruptions have a separate, higher
bound (``retries.interruptions``), because a request may also crash every engine that runs it.
"""

from __future__ import annotations

from aprilsched.kernel.core.config import SchedulerConfig
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.ledger import FAILURES, REFUSED, Reason
from aprilsched.kernel.core.state.records import GroupRecord, RequestRecord, RolloutRecord
from aprilsched.kernel.core.state.state import Outbox, SchedulerState

_IN_A_ROW = FAILURES - {Reason.VERSION_LOST}
"""Reasons that count towards ``retries.failed_groups``. A lost version does not, because all of its
episodes are lost at once."""


def abort(in_flight: InFlight, out: Outbox, request: RequestRecord) -> None:
    """Abort an open attempt on its engine; a second call is a no-op."""
    if not request.aborting:
        in_flight.call_back(request)
        out.tell(facts.AttemptCalledBack(request_id=request.request_id))
        out.commands.append(
            do.Abort(engine=request.engine, request_id=request.request_id, attempt=request.attempt)
        )


def drop(
    state: SchedulerState,
    group: GroupRecord,
    reason: Reason,
    cause: str,
    *,
    culprit: int | None = None,
) -> None:
    """Move a whole group from flight to the ledger.

    `culprit` is the rollout whose failure also drops its siblings. If samples are delivered, it
    alone is dropped, unless the group becomes too small.
    """
    splits = state.in_flight.splits(group) and group.size > state.config.retries.smallest_group
    rest = group
    if culprit is not None and splits:
        group, culprit = state.in_flight.lose(group, state.in_flight.rollouts[culprit]), None
        state.in_flight.forget_empty(rest)
    for member in group.members:
        if member.request is not None and member.request.open:
            abort(state.in_flight, state.out, member.request)
    if group.evaluation_id is None and not group.complete:
        state.note_lengths(group)
    entries = state.in_flight.drop(group, reason, cause, culprit=culprit, now=state.now)
    state.out.announce(
        facts.GroupDropped(
            group_id=group.group_id,
            reason=reason.value,
            cause=cause,
            rollouts=tuple(
                facts.DroppedRollout(
                    rollout_id=entry.rollout_id, reason=entry.reason.value, tokens=entry.tokens
                )
                for entry in entries
            ),
            culprit=culprit,
        )
    )
    # A prompt has not failed if only one of its samples has.
    is_last = rest is group and not group.samples and group.origin not in state.in_flight.groups
    if group.evaluation_id is None and reason in FAILURES and is_last:
        state.prompts.outcome.fail(cause)
    if reason in _IN_A_ROW:
        _count_failure(state, cause)


def discard(
    in_flight: InFlight,
    out: Outbox,
    rollout: RolloutRecord,
    sampled: int,
    environment: int,
    reason: Reason,
) -> None:
    """Count tokens that were removed from the log of a rollout that continues."""
    if not sampled and not environment:
        return
    # The saved tokens are no longer valid.
    rollout.rewritten = True
    in_flight.journal.change(rollout)
    in_flight.counters.tokens_discarded += sampled
    in_flight.ledger.late_tokens(reason, sampled)
    out.tell(
        facts.TokensDiscarded(
            rollout_id=rollout.rollout_id,
            sampled=sampled,
            environment=environment,
            reason=reason.value,
        )
    )


def on_group_withdrawn(state: SchedulerState, group: GroupRecord, event: ev.GroupWithdrawn) -> None:
    """Drop a withdrawn group, and its single samples, unless the trainer already has them."""
    if group.evaluation_id is not None:
        return
    own = [each for each in state.in_flight.training_groups() if each.source == group.group_id]
    for unit in (*own, *([group] if group.members else ())):
        if not unit.offered and not state.delivery.involves(unit.group_id):
            drop(state, unit, Reason.WITHDRAWN, event.cause)


def refuse(state: SchedulerState, cause: str) -> None:
    """Record an unusable prompt in the ledger.

    It counts as a failure, so a source that yields only such prompts ends the run.
    """
    entry = state.in_flight.refuse(Reason.BAD_PROMPT, cause, now=state.now)
    state.out.announce(
        facts.PromptRefused(rollout_id=entry.rollout_id, group_id=entry.group_id, cause=cause)
    )
    state.prompts.outcome.fail(cause)
    _count_failure(state, cause)


def _count_failure(state: SchedulerState, cause: str) -> None:
    """Count a failed group or single sample, and give up the run after too many in a row.

    Otherwise a reward function that always raises would use up every prompt, while the trainer
    waits forever.
    """
    state.prompts.consecutive_failures += 1
    count = state.prompts.consecutive_failures
    if count == state.config.retries.failed_groups:
        state.out.tell(facts.GroupsFailed(groups=count, cause=cause))
        error = state.prompts.outcome.given_up(f"{count} {state.config.delivery}", cause)
        state.out.commands.append(do.GiveUp(error=error))


def count_rejection(state: SchedulerState) -> None:
    """Count a unit that `accept` rejected, and give up the run after too many in a row."""
    state.prompts.consecutive_rejections += 1
    count = state.prompts.consecutive_rejections
    if count == state.config.retries.rejected_groups:
        error = state.prompts.outcome.all_rejected(f"{count} {state.config.delivery}")
        state.out.commands.append(do.GiveUp(error=error))


def count_failure(request: RequestRecord, config: SchedulerConfig, event: ev.Failed) -> str:
    """Count a failed attempt and return why the request is given up.

    The result includes the cause; it is empty if the request is retried.
    """
    if event.final:
        return f"{REFUSED} {request.attempt}: {event.cause}"
    if request.gained or event.unsent:
        return count_interruption(request, config, event.cause)
    request.failures += 1
    if request.failures < config.retries.attempts:
        return ""
    count = f"{request.failures} attempts in a row failed without a new token"
    return f"{count}, the last: {event.cause}"


def count_interruption(request: RequestRecord, config: SchedulerConfig, cause: str) -> str:
    """Count an attempt that broke off and return why the request is given up.

    The result includes the cause; it is empty if the request is retried.
    """
    if request.gained:
        request.failures = 0
    request.interruptions += 1
    if request.interruptions < config.retries.interruptions:
        return ""
    return f"{request.interruptions} attempts broke off, the last: {cause}"
