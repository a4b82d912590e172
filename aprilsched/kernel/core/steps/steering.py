"""Decides what the engines should be doing: run, pause, or pause ready for a refit."""

from __future__ import annotations

from aprilsched.kernel.core.state.engine_control import PAUSE, RUN, Goal
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.state.weights import UpdatePhase
from aprilsched.kernel.core.steps.batch import training_runs
from aprilsched.kernel.core.steps.drop import abort


def interrupt(state: SchedulerState) -> None:
    """Abort all open requests if no training rollout should run and the rule requires it.

    This precedes any pause: a request that is aborted after a retract returns without the tokens
    that were not streamed yet (hazard 1).
    """
    in_flight = state.in_flight
    # Memory cannot be released under requests, unless the engine can hold them in a pause.
    releasing = state.fleet.sleep is not None and not state.fleet.sleep.inside
    rule = state.behaviour.called_back
    if (
        not (
            rule == "always"
            or (rule == "for sleep" and releasing)
            or (rule != "never" and state.weights.leaves_adapters)
        )
        or in_flight.called_back == in_flight.open_attempts
    ):
        return
    if state.evaluations.running or training_runs(state):
        return
    for request in in_flight.open_requests():
        abort(in_flight, state.out, request)


def steer(state: SchedulerState) -> None:
    """Issue the next control call of every engine that has not reached the goal."""
    calls = state.fleet.control.reconcile(
        goal(state), idle=lambda name: not state.in_flight.open[name]
    )
    state.out.commands.extend(calls)


def goal(state: SchedulerState) -> Goal:
    """Return what the engines should be doing."""
    update, sleep = state.weights.update, state.fleet.sleep
    if state.stragglers.calling_back:
        return RUN
    if update is not None and update.pauses:
        # Until an update may pause the engines, it waits for their requests to finish.
        if update.phase is UpdatePhase.WAITING:
            return RUN
        return Goal(kind="refit", away=sleep.away_in_refit if sleep else frozenset())
    if sleep is not None and not sleep.waking:
        return Goal(kind="pause", away=sleep.away) if sleep.may_pause else RUN
    if not state.behaviour.waits_inside or state.evaluations.running or training_runs(state):
        return RUN
    return PAUSE
