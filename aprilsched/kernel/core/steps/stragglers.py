"""Defers stragglers and chooses the groups that run, if more are open than run (length buckets).

The request of a deferred rollout is neither queued nor on an engine. When a batch is full or an
update starts, everything is aborted and deferred. When the next batch starts, the members that the
rule chooses become eligible.

Engines are paused only once the aborted requests have returned: a request that is aborted after a
retract returns without the tokens that were not streamed yet (hazard 1).
"""

from __future__ import annotations

import numpy as np

from aprilsched.kernel.core.policies.refill import OpenGroups, Refill
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.records import (
    GENERATING,
    GroupRecord,
    RolloutRecord,
    State,
    member_tokens,
)
from aprilsched.kernel.core.state.state import SchedulerState, Stragglers
from aprilsched.kernel.core.steps.batch import training_runs
from aprilsched.kernel.core.steps.drop import abort


def defer_stragglers(state: SchedulerState) -> None:
    """Abort and defer all training requests, once for each stop of the generation."""
    _forget_returned(state.stragglers, state.in_flight)
    if not state.plan.schedule.refill.defers:
        return
    if training_runs(state):
        state.stragglers.deferred = False
        return
    if state.stragglers.deferred:
        return
    state.stragglers.deferred = True
    defer_all(state.in_flight)
    for request in state.in_flight.open_requests():
        if request.rollout.group.in_training and not request.aborting:
            state.stragglers.calling_back.append((request.request_id, request.attempt))
            abort(state.in_flight, state.out, request)


def _forget_returned(stragglers: Stragglers, in_flight: InFlight) -> None:
    """Remove returned requests from the end of the list.

    Only whether one is left matters. Examining thousands of them after every event would cost more
    than everything else.
    """
    calling_back = stragglers.calling_back
    while calling_back and in_flight.attempt(*calling_back[-1]) is None:
        calling_back.pop()


def choose_groups(state: SchedulerState) -> None:
    """Choose the groups that run, if the refill rule defers groups.

    This happens when a batch starts, when all chosen groups have ended, and when the tail of the
    batch starts, if the rule requires that.
    """
    refill = state.plan.schedule.refill
    if not refill.defers or not training_runs(state):
        return
    if state.prompts.fetching and not state.prompts.dry:
        return
    starts = state.plan.groups_unchosen or _idle(state.in_flight)
    tail = not starts and state.in_flight.generating <= state.plan.tail_threshold
    if not (starts or tail):
        return
    # Once an exhausted source yields prompts again, the choice is repeated among more groups.
    supplied = state.in_flight.training >= state.plan.target_groups
    state.plan.groups_unchosen = state.prompts.dry and not supplied
    groups = [group for group in state.in_flight.training_groups() if not group.complete]
    if groups:
        view = _view(state, groups, tail=tail)
        for group, started in zip(groups, refill.members(view).tolist(), strict=True):
            if started and group.first_run is None:
                group.first_run = state.batch_number
                state.in_flight.journal.change_group(group)
            _release(state.in_flight, group.members[:started])
    state.plan.tail_threshold = -1 if tail else _tail_threshold(refill, groups)


def _tail_threshold(refill: Refill, groups: list[GroupRecord]) -> int:
    if refill.tail_begins is None:
        return -1
    open_members = [m for group in groups for m in group.members if m.state in GENERATING]
    started = sum(member.eligible for member in open_members)
    deferred = len(open_members) - started
    return deferred + int((1 - refill.tail_begins) * started)


def defer_all(in_flight: InFlight) -> None:
    """Defer everything, because the batch is full; the caller aborts requests on engines."""
    for group in in_flight.training_groups():
        for member in group.members:
            if member.eligible and member.state in GENERATING:
                member.eligible = False
                in_flight.journal.change(member)
                if member.request is not None:
                    in_flight.queue.discard(member.request)


def release_all(in_flight: InFlight) -> None:
    """Make everything eligible, because the refill rule no longer defers groups."""
    for group in in_flight.training_groups():
        _release(in_flight, group.members)


def _idle(in_flight: InFlight) -> bool:
    if in_flight.open_attempts or in_flight.queue or not in_flight.generating:
        return False
    members = (member for group in in_flight.training_groups() for member in group.members)
    return not any(member.eligible and member.state in GENERATING for member in members)


def _view(state: SchedulerState, groups: list[GroupRecord], *, tail: bool) -> OpenGroups:
    batch = state.batch_number
    tokens, finished = member_tokens(groups)
    since = [-1 if group.first_run is None else batch - group.first_run for group in groups]
    return OpenGroups(
        tokens=tokens,
        finished=finished,
        sizes=np.array([len(group.members) for group in groups], dtype=np.int64),
        ages=np.array([batch - group.opened for group in groups], dtype=np.int64),
        since_first_run=np.array(since, dtype=np.int64),
        running=np.array([_runs(group) for group in groups], dtype=np.bool_),
        wanted=state.plan.target_groups - state.ready_groups,
        lacking=state.batch_groups - state.ready_groups,
        tail=tail,
        log_lengths=state.expectations.log_lengths(),
        levels=state.expectations.levels(groups),
    )


def _runs(group: GroupRecord) -> bool:
    """Return whether a member of the group runs.

    A member that is being aborted does not count. A trainer that takes two batches under one
    version requests the second batch while the probes of the first are being aborted. Otherwise all
    groups of these probes would run.
    """
    requests = (m.request for m in group.members if m.state in (State.RUNNING, State.HELD))
    return any(request is not None and not request.aborting for request in requests)


def _release(in_flight: InFlight, members: list[RolloutRecord]) -> None:
    for member in members:
        if not member.eligible:
            member.eligible = True
            in_flight.journal.change(member)
            if member.state is State.QUEUED and member.request is not None:
                in_flight.queue.add(member.request)
