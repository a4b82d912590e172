"""Decides what becomes of each straggler, once when a batch is full or an update begins.

A straggler is a rollout that still runs then. Some may run on up to a limit of tokens. Some are
called back, because their KV is not worth keeping. The others stay inside the paused engine.
Engines are paused only when those that run on have ended or reached their limit, and those that
were called back are back: a request that is aborted after a retract comes back without the tokens
that were not streamed yet (hazard 1).
"""

from __future__ import annotations

from aprilsched.core.policies.straggler import Situation, Straggler
from aprilsched.core.state.records import RequestRecord
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.batch import training_runs
from aprilsched.core.steps.buckets import defer_all
from aprilsched.core.steps.drop import abort

__all__ = ["resolve_stragglers"]


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
    stragglers = [r for r in state.in_flight.open_requests() if _training(r) and not r.aborting]
    if not stragglers:
        return
    if defers:
        for request in stragglers:
            _call_back(state, request)
        return
    _decide(state, stragglers)


def _training(request: RequestRecord) -> bool:
    group = request.rollout.group
    return group.evaluation_id is None and group.dropped is None


def _prune(state: SchedulerState) -> None:
    """Forget the last ones as far as they have ended. What counts is whether one is left, and to
    look at thousands of them after every event would cost more than everything else."""
    run_on = state.stragglers.run_on
    while run_on:
        request_id, (attempt, limit) = next(reversed(run_on.items()))
        request = state.in_flight.attempt(request_id, attempt)
        if request is not None and len(request.rollout.log) < limit:
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
        [_view(state, request) for request in stragglers],
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
            limit = len(request.rollout.log) + decision.run_on
            state.stragglers.run_on[request.request_id] = (request.attempt, limit)


def _view(state: SchedulerState, request: RequestRecord) -> Straggler:
    rollout = request.rollout
    group = rollout.group
    expected = state.expectations
    return Straggler(
        context=len(rollout.prompt_ids) + len(rollout.log),
        group_tokens=group.tokens if group.unfinished == 1 else 0,
        ends_within=lambda tokens: expected.ends_within(request, tokens),
        remaining=lambda: expected.remaining(request),
    )


def _call_back(state: SchedulerState, request: RequestRecord) -> None:
    state.stragglers.run_on.pop(request.request_id, None)
    state.stragglers.calling_back.append((request.request_id, request.attempt))
    abort(state, request)
