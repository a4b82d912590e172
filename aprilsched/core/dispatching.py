"""What the engines should be doing, and what is sent to them."""

from __future__ import annotations

from aprilsched.core.batches import full
from aprilsched.core.commands import Refit, Send
from aprilsched.core.control import Goal
from aprilsched.core.dropping import abort
from aprilsched.core.policies.placement import place
from aprilsched.core.records import RequestRecord
from aprilsched.core.state import SchedulerState

__all__ = ["dispatch", "interrupt", "steer"]


def interrupt(state: SchedulerState) -> None:
    """Under "abort", stragglers are called back when no training rollout should run.

    Before any pause: a request aborted after a retract comes back without the tokens that had
    not been streamed yet (hazard 1).
    """
    book = state.book
    if state.rules.straggler != "abort" or book.called_back == book.open_attempts:
        return
    if state.evaluations or _training_runs(state):
        return
    for request in book.open_requests():
        abort(state, request)


def steer(state: SchedulerState) -> None:
    """Give the next control call of every engine that is not where it should be."""
    version = state.update.version if state.update is not None else None
    idle = frozenset(engine for engine in state.control.engines if not state.book.open[engine])
    for command in state.control.reconcile(_goal(state), version=version, idle=idle):
        if isinstance(command, Refit) and state.update is not None:
            state.update.refitting = frozenset(command.engines)
        state.commands.append(command)


def dispatch(state: SchedulerState) -> None:
    """Send what waits to engines that run; nothing is ever sent to a paused one (hazard 4)."""
    if not state.book.queue or _goal(state) != "run":
        return
    loads = {e: state.book.open[e] for e in state.control.engines if state.control.runs(e)}
    training = _training_runs(state)
    limit = state.rules.max_in_flight
    while loads and (limit is None or state.book.open_attempts < limit):
        request = state.book.queue.first(training=training)
        if request is None:
            return
        engine = place(
            loads,
            prefer=request.rollout.group.engine,
            avoid=request.avoid,
            slack=state.rules.group_size,
        )
        loads[engine] += 1
        _send(state, request, engine)


def _send(state: SchedulerState, request: RequestRecord, engine: str) -> None:
    state.book.open_attempt(request, engine)
    rollout = request.rollout
    state.commands.append(
        Send(
            engine=engine,
            request_id=request.request_id,
            attempt=request.attempt,
            rollout_id=rollout.rollout_id,
            group_id=rollout.group.group_id,
            input_ids=rollout.context(),
            sampling=request.sampling.after(request.generated),
        )
    )


def _training_runs(state: SchedulerState) -> bool:
    """Should training rollouts be generated now?"""
    if state.update is not None:
        return False
    return state.asynchronous or (state.wanted and not full(state))


def _goal(state: SchedulerState) -> Goal:
    if state.update is not None:
        # Until it may pause the engines, an update waits for what runs in them to end.
        return "refit" if state.update.quiet else "run"
    if state.rules.straggler in ("abort", "run"):
        return "run"
    return "run" if state.evaluations or _training_runs(state) else "pause"
