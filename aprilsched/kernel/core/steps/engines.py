"""Handles engines that join, reply to control calls, enter or leave standby, and are lost.

It also handles the hold, in which a trainer pauses and resumes the engines by explicit calls. A
held fleet is paused like one whose batch is full: requests wait inside the engines if the straggler
policy allows it (``retract``, ``in_place``), are aborted (``abort``), or run to completion
(``run``). Running evaluations finish first. An update that arrives during a hold is carried out,
and the engines stay paused after it.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.engine_control import Mode
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import GENERATING, Move, RequestRecord, State
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.steps.drop import count_interruption
from aprilsched.kernel.core.steps.members import lose_member
from aprilsched.kernel.core.steps.outage import note_join, note_loss
from aprilsched.kernel.core.steps.replan import tell_schedule
from aprilsched.kernel.core.steps.resume import call_again
from aprilsched.kernel.core.steps.sessions import forget_sessions
from aprilsched.kernel.core.steps.turns import take_back


def on_opened(state: SchedulerState, event: ev.Opened) -> None:
    if not state.restored:
        newest = max(engine.version or 0 for engine in event.engines)
        state.weights.versions.trainer = state.weights.base = newest
    state.weights.republishable = event.republishable
    standby = tuple(e.name for e in event.engines if not _opens_in_use(state, e.version))
    state.out.tell(
        facts.RunOpened(
            engines=event.engines,
            version=state.weights.versions.trainer,
            resumed=state.restored,
            siblings=state.in_flight.siblings,
            pace=state.config.first_pace,
            batches=state.in_flight.counters.batches,
            standby=standby,
        )
    )
    if state.restored and state.config.pace == "auto":
        # The log of the previous run may end before the fact that records the pace.
        tell_schedule(state.plan, state.out, kept=True)
    for engine in event.engines:
        _join(state, engine, standby=engine.name in standby)
        if engine.name not in standby:
            state.weights.versions.note(engine.name, engine.version)
    state.resumed = state.resumed and bool(state.fleet.control.engines)
    if state.restored:
        call_again(state)


def _opens_in_use(state: SchedulerState, version: int | None) -> bool:
    """Return whether an engine has the fleet's version, or the older version of resumed rollouts
    that continue under it (rolling refits)."""
    if version == state.weights.versions.trainer and state.weights.adapter is None:
        return True
    if not state.rolling or version is None or version > state.weights.versions.trainer:
        return False
    rollouts = state.in_flight.rollouts.values()
    return any(
        rollout.state in GENERATING and rollout.log.oldest_version == version
        for rollout in rollouts
    )


def on_engine_joined(state: SchedulerState, event: ev.EngineJoined) -> None:
    """Add a new or returning engine; it is in use if it has the fleet's version."""
    engine = event.info
    if state.fleet.control.of(engine.name) is not None:
        return
    refitting = (
        state.weights.update.refitting if state.weights.update is not None else frozenset[str]()
    )
    if state.weights.update is not None and engine.name not in refitting:
        # The engine was lost before the load call was sent, so the call may still be sent.
        state.weights.update.answers.pop(engine.name, None)
    current = engine.version == state.weights.versions.trainer and state.weights.adapter is None
    standby = not current or bool(refitting)
    _join(state, engine, standby=True)
    state.out.tell(facts.EngineJoined(info=engine))
    note_join(state.fleet, state.now, engine.name)
    if not standby:
        promote(state, engine.name)


def _join(state: SchedulerState, engine: ev.EngineInfo, *, standby: bool) -> None:
    state.fleet.control.join(engine, standby=standby, now=state.now)
    state.fleet.health.join(engine.name, engine.able.max_running_requests, state.now)
    if engine.able.stores_kv and state.cached_kv == "recompute" and state.behaviour.waits_inside:
        # A request that waits inside keeps its cache key, and would find older KV under it.
        state.behaviour = state.behaviour.called_back_first()


def promote(state: SchedulerState, engine: str) -> None:
    """Put a standby engine into use, because it has the fleet's version."""
    control = state.fleet.control.standby.pop(engine)
    control.catching_up = False
    control.broken_connection, control.version_seen_at = "", state.now
    if state.weights.adapter is None:
        control.base = state.weights.versions.trainer
    state.fleet.control.engines[engine] = control
    state.fleet.control.touch(engine)
    state.weights.versions.note(engine, state.weights.versions.trainer)
    state.out.announce(facts.EngineAdmitted(engine=engine, version=state.weights.versions.trainer))


def on_paused(state: SchedulerState, event: ev.Paused) -> None:
    state.note_work(event.engine)
    if state.fleet.control.confirm(event.engine, Mode.PAUSING, Mode.PAUSED) is not None:
        _move_open(state.in_flight, event.engine, State.RUNNING, "hold")


def on_flushed(state: SchedulerState, event: ev.Flushed) -> None:
    control = state.fleet.control.confirm(event.engine, Mode.FLUSHING, Mode.PAUSED)
    if control is not None:
        control.flushed = True
        forget_sessions(state, event.engine)


def on_continued(state: SchedulerState, event: ev.Continued) -> None:
    state.note_work(event.engine)
    control = state.fleet.control.confirm(event.engine, Mode.CONTINUING, Mode.RUNNING)
    if control is None:
        return
    _move_open(state.in_flight, event.engine, State.HELD, "continue")
    state.fleet.health.of(event.engine).silence = 0.0
    if control.flushed:
        for request in state.in_flight.open_requests(event.engine):
            request.pending_prefill = request.rollout.computed_tokens
            state.fleet.health.of(event.engine).pending_prefill += request.pending_prefill


def on_hold_changed(state: SchedulerState, event: ev.HoldChanged) -> None:
    state.fleet.paused_by_trainer = event.held


def on_control_failed(state: SchedulerState, event: ev.ControlFailed) -> None:
    control = state.fleet.control.of(event.engine)
    if control is not None:
        state.out.tell(
            facts.ControlCallFailed(engine=event.engine, call=event.call, cause=event.cause)
        )
    before = (
        f"{control.broken_connection}; then "
        if control is not None and control.broken_connection
        else ""
    )
    lose(state, event.engine, f"{before}{event.call} failed: {event.cause}")


def on_engine_lost(state: SchedulerState, event: ev.EngineLost) -> None:
    lose(state, event.engine, event.cause)


def lose(state: SchedulerState, engine: str, cause: str) -> None:
    """Quarantine an engine; its requests continue elsewhere with all tokens known so far."""
    control = state.fleet.control
    if control.of(engine) is None:
        return
    last = not (control.engines.keys() | control.standby.keys()) - {engine}
    lost = facts.EngineLost(engine=engine, cause=cause, last=last)
    state.out.tell(lost)
    broken = _leave(state, engine, cause)
    del control.standby[engine]
    state.weights.adapters.pop(engine, None)
    note_loss(state.fleet, state.now, engine, cause)
    # The requests must be back in the queue before the shell closes the engine's streams.
    state.out.commands.append(lost)
    _count_interruptions(state, broken, f"{engine} was lost: {cause}")


def demote(state: SchedulerState, engine: str, cause: str) -> None:
    """Put an engine on standby: it responds, but lacks the fleet's weights."""
    lost = facts.EngineLost(engine=engine, cause=cause, standby=True)
    state.out.tell(lost)
    _leave(state, engine, cause)
    state.out.commands.append(lost)


def _leave(state: SchedulerState, engine: str, cause: str) -> list[RequestRecord]:
    """Take an engine out of use and return the requests that it had.

    Its record moves to the engines on standby.
    """
    control = state.fleet.control.engines.pop(engine, None)
    if control is not None:
        state.fleet.control.standby[engine] = control
        state.fleet.control.touch(engine)
        state.weights.versions.note(engine, None)
    forget_sessions(state, engine)
    requests = list(state.in_flight.open_requests(engine))
    for request in requests:
        state.in_flight.close_attempt(request, None)
        state.out.tell(facts.AttemptEnded(request_id=request.request_id, outcome="engine_lost"))
        request.shun(engine)
        take_back(state, request)
    if state.weights.update is not None:
        state.weights.update.answers.setdefault(engine, (None, cause))
    return requests


def _count_interruptions(state: SchedulerState, requests: list[RequestRecord], cause: str) -> None:
    """Count an interruption of each request, and lose the members whose request is given up.

    This must follow the return of all requests to the queue, because siblings of a dropped rollout
    must not be aborted on an engine that is gone.
    """
    for request in requests:
        exhausted = count_interruption(request, state.config, cause)
        if exhausted and request.request_id in state.in_flight.requests:
            lose_member(state, request.rollout, Reason.FAILED, exhausted)


def _move_open(in_flight: InFlight, engine: str, where: State, move: Move) -> None:
    for request in in_flight.open_requests(engine):
        if request.rollout.state is where:
            request.rollout.move(move)
