"""Decides what becomes of each straggler, once when a batch is full or an update begins.

A straggler is a rollout that still runs then. Some may run on up to a limit of tokens. Some are
called back, because their KV is not worth keeping. The others stay inside the paused engine.
Engines are paused only when those that run on have ended or reached their limit, and those that
were called back are back: a request that is aborted after a retract comes back without the tokens
that were not streamed yet (hazard 1).
"""

from __future__ import annotations

import numpy as np

from aprilsched.core.policies.refill import OpenGroups, Refill
from aprilsched.core.policies.straggler import Situation, Straggler
from aprilsched.core.state.records import (
    GENERATING,
    GroupRecord,
    RequestRecord,
    RolloutRecord,
    State,
    member_tokens,
)
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.batch import training_runs
from aprilsched.core.steps.drop import abort


def resolve_stragglers(state: SchedulerState) -> None:
    """Decide about the stragglers of a stop, once; and forget those that have ended since then."""
    if state.stragglers.run_on or state.stragglers.calling_back:
        _prune(state)
    defers = state.plan.schedule.refill.defers
    if not (defers or state.behaviour.decide):
        return
    if training_runs(state):
        state.stragglers.resolved = False
        return
    if state.stragglers.resolved:
        return
    state.stragglers.resolved = True
    if defers:
        defer_all(state)
    stragglers = [
        r for r in state.in_flight.open_requests() if r.rollout.group.in_training and not r.aborting
    ]
    if not stragglers:
        return
    if defers:
        for request in stragglers:
            _call_back(state, request)
        return
    _decide(state, stragglers)


def _prune(state: SchedulerState) -> None:
    """Forget the last ones as far as they have ended. What counts is whether one is left, and to
    look at thousands of them after every event would cost more than everything else."""
    run_on = state.stragglers.run_on
    while run_on:
        request_id, (attempt, limit) = next(reversed(run_on.items()))
        request = state.in_flight.attempt(request_id, attempt)
        if request is not None and request.rollout.log.size < limit:
            break
        run_on.popitem()
    calling_back = state.stragglers.calling_back
    while calling_back:
        if state.in_flight.attempt(*calling_back[-1]) is not None:
            break
        calling_back.pop()


def _decide(state: SchedulerState, stragglers: list[RequestRecord]) -> None:
    config = state.config
    if state.behaviour.decide is None:
        return
    decisions = state.behaviour.decide(
        [_straggler(state, request) for request in stragglers],
        Situation(
            prices=config.prices,
            usual=state.usual_running,
            engines=len(state.fleet.control.engines),
            kv=state.cached_kv,
        ),
    )
    for request, decision in zip(stragglers, decisions, strict=True):
        if decision.call_back:
            _call_back(state, request)
        elif decision.run_on:
            limit = request.rollout.log.size + decision.run_on
            state.stragglers.run_on[request.request_id] = (request.attempt, limit)


def _straggler(state: SchedulerState, request: RequestRecord) -> Straggler:
    rollout = request.rollout
    group = rollout.group
    expected = state.expectations
    return Straggler(
        context=rollout.computed_tokens,
        group_tokens=group.tokens if group.unfinished == 1 else 0,
        ends_within=lambda tokens: expected.ends_within(request, tokens),
        remaining=lambda: expected.remaining(request),
    )


def _call_back(state: SchedulerState, request: RequestRecord) -> None:
    state.stragglers.run_on.pop(request.request_id, None)
    state.stragglers.calling_back.append((request.request_id, request.attempt))
    abort(state, request)


# --- buckets -------------------------------------------------------------------------------------

# Decides which open groups run, if the refill rule keeps more groups open than run.
#
# The request of a deferred rollout neither waits to be sent nor is with an engine. When a batch is
# full, everything is called back and deferred. When the next batch begins, the members that the
# rule chooses become eligible.


def choose_groups(state: SchedulerState) -> None:
    """Choose the groups that run, when a batch begins, when all chosen groups have ended, and when
    the tail of the batch begins, if the refill rule asks for that."""
    refill = state.plan.schedule.refill
    if not refill.defers or not training_runs(state):
        return
    if state.prompts.fetching and not state.prompts.dry:
        return
    begins = state.plan.choice_pending or _idle(state)
    tail = not begins and state.in_flight.generating <= state.plan.tail_below
    if not (begins or tail):
        return
    # The choice is made again, among more groups, when a source that is dry gives more prompts.
    supplied = state.in_flight.training >= state.plan.target_groups
    state.plan.choice_pending = state.prompts.dry and not supplied
    groups = [group for group in state.in_flight.training_groups() if not group.complete]
    if groups:
        view = _view(state, groups, tail=tail)
        for group, started in zip(groups, refill.members(view).tolist(), strict=True):
            if started and group.first_run is None:
                group.first_run = state.begun
                state.in_flight.journal.change_group(group)
            _release(state, group.members[:started])
    state.plan.tail_below = -1 if tail else _tail_below(state, refill, groups)


def _tail_below(state: SchedulerState, refill: Refill, groups: list[GroupRecord]) -> int:
    if refill.tail_begins is None:
        return -1
    open_members = [m for group in groups for m in group.members if m.state in GENERATING]
    started = sum(member.eligible for member in open_members)
    deferred = len(open_members) - started
    return deferred + int((1 - refill.tail_begins) * started)


def defer_all(state: SchedulerState) -> None:
    """Defer everything, because the batch is full. Requests that are with engines are called back
    by the caller."""
    for group in state.in_flight.training_groups():
        for member in group.members:
            if member.eligible and member.state in GENERATING:
                member.eligible = False
                state.in_flight.journal.change(member)
                if member.request is not None:
                    state.in_flight.queue.discard(member.request)


def release_all(state: SchedulerState) -> None:
    """Make everything eligible, because the refill rule does not defer any more."""
    for group in state.in_flight.training_groups():
        _release(state, group.members)


def _idle(state: SchedulerState) -> bool:
    in_flight = state.in_flight
    if in_flight.open_attempts or in_flight.queue or not in_flight.generating:
        return False
    members = (member for group in in_flight.training_groups() for member in group.members)
    return not any(member.eligible and member.state in GENERATING for member in members)


def _view(state: SchedulerState, groups: list[GroupRecord], *, tail: bool) -> OpenGroups:
    batch = state.begun
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
        law=state.expectations.log_law(),
        levels=state.expectations.levels(groups),
    )


def _runs(group: GroupRecord) -> bool:
    """Whether a member of the group runs.

    A member that is being called back does not count. A trainer that takes two batches under one
    version asks for the second batch while the probes of the first are called back, and otherwise
    all groups of these probes would run.
    """
    requests = (m.request for m in group.members if m.state in (State.RUNNING, State.HELD))
    return any(request is not None and not request.aborting for request in requests)


def _release(state: SchedulerState, members: list[RolloutRecord]) -> None:
    for member in members:
        if not member.eligible:
            member.eligible = True
            state.in_flight.journal.change(member)
            if member.state is State.QUEUED and member.request is not None:
                state.in_flight.queue.add(member.request)
