"""Handles engines that join, answer control calls, go on standby, come into use, and are lost, and
the hold of a trainer that pauses and continues them by calls of its own.

A held fleet is paused like one whose batch is full: requests wait inside the engines where the
straggler policy lets them (``retract``, ``in_place``), are called back (``abort``), or
run to their end (``run``). Running evaluations end first. An update that comes meanwhile is carried
out, and the engines stay paused after it.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.delivery import Demand
from aprilsched.kernel.core.state.engine_control import EngineControl, Mode
from aprilsched.kernel.core.state.engine_health import (
    PREFILL_TOKENS_PER_S,
    SLOW_WINDOWS,
    EngineHealth,
    Window,
)
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import GENERATING, Move, RequestRecord, State
from aprilsched.kernel.core.state.state import Outage, SchedulerState
from aprilsched.kernel.core.state.weights import UpdatePhase
from aprilsched.kernel.core.steps.drop import count_interruption, drop
from aprilsched.kernel.core.steps.members import lose_member
from aprilsched.kernel.core.steps.replan import tell_schedule
from aprilsched.kernel.core.steps.resume import call_again
from aprilsched.kernel.core.steps.turns import take_back


def on_opened(state: SchedulerState, event: ev.Opened) -> None:
    if not state.resumed:
        _start(state, event.engines[0].version or 0)
    elif event.adopt and state.weights.adapter is None:
        _adopt(state, {engine.version for engine in event.engines})
    state.tell(
        facts.RunOpened(
            engines=event.engines, version=state.weights.versions.trainer, resumed=state.resumed
        )
    )
    if state.resumed and state.config.pace == "auto":
        # The log of the prior run may end before the fact that names the pace.
        tell_schedule(state, kept=True)
    for engine in event.engines:
        current = engine.version == state.weights.versions.trainer and state.weights.adapter is None
        finishes = not current and _finishes_rollouts(state, engine.version)
        standby = not (current or finishes)
        _join(state, engine, standby=standby)
        if not standby:
            state.weights.versions.note(engine.name, engine.version)
    if state.resumed:
        call_again(state)


def _finishes_rollouts(state: SchedulerState, version: int | None) -> bool:
    """Whether rollouts of a resumed run go on under this older version (rolling refits)."""
    if not state.rolling or version is None or version > state.weights.versions.trainer:
        return False
    rollouts = state.in_flight.rollouts.values()
    return any(
        rollout.state in GENERATING and rollout.log.oldest_version == version
        for rollout in rollouts
    )


def _start(state: SchedulerState, version: int) -> None:
    state.weights.versions.trainer = version
    state.weights.base = version


def _adopt(state: SchedulerState, versions: set[int | None]) -> None:
    """Adopt the engines' version if they all have one that is newer than the resumed run's.

    The prior run then ended during an update that every engine has taken.
    """
    version = versions.pop() if len(versions) == 1 else None
    if version is not None and version > state.weights.versions.trainer:
        _start(state, version)


def on_engine_joined(state: SchedulerState, event: ev.EngineJoined) -> None:
    """Add a new engine, or a lost one that is back. It is in use if it has the fleet's version."""
    engine = event.info
    if state.fleet.control.of(engine.name) is not None:
        return
    refitting = (
        state.weights.update.refitting if state.weights.update is not None else frozenset[str]()
    )
    if state.weights.update is not None and engine.name not in refitting:
        # The engine was lost before it was told to load the version, so it can be told now.
        state.weights.update.answers.pop(engine.name, None)
    current = engine.version == state.weights.versions.trainer and state.weights.adapter is None
    standby = not current or bool(refitting)
    _join(state, engine, standby=True)
    state.tell(facts.EngineJoined(info=engine))
    note_join(state, engine.name)
    if not standby:
        promote(state, engine.name)


def _join(state: SchedulerState, engine: ev.EngineInfo, *, standby: bool) -> None:
    state.fleet.control.join(engine, standby=standby, now=state.now)
    state.fleet.health.join(engine.name, engine.max_running, state.now)
    if engine.stores_kv and state.cached_kv == "recompute" and state.behaviour.waits_inside:
        # A request that waits inside keeps its cache key, and would find older keys under it.
        state.behaviour = state.behaviour.called_back_first()


def promote(state: SchedulerState, engine: str) -> None:
    """Bring an engine on standby into use, because it has the fleet's version."""
    control = state.fleet.control.standby.pop(engine)
    control.catching_up = False
    control.broken_connection, control.version_seen_at = "", state.now
    if state.weights.adapter is None:
        control.base = state.weights.versions.trainer
    state.fleet.control.engines[engine] = control
    state.fleet.control.touch(engine)
    state.weights.versions.note(engine, state.weights.versions.trainer)
    state.announce(facts.EngineAdmitted(engine=engine, version=state.weights.versions.trainer))


def on_paused(state: SchedulerState, event: ev.Paused) -> None:
    state.note_work(event.engine)
    if state.fleet.control.confirm(event.engine, Mode.PAUSING, Mode.PAUSED) is not None:
        _move_open(state, event.engine, State.RUNNING, Move.HOLD)


def on_flushed(state: SchedulerState, event: ev.Flushed) -> None:
    control = state.fleet.control.confirm(event.engine, Mode.FLUSHING, Mode.PAUSED)
    if control is not None:
        control.flushed = True


def on_continued(state: SchedulerState, event: ev.Continued) -> None:
    state.note_work(event.engine)
    control = state.fleet.control.confirm(event.engine, Mode.CONTINUING, Mode.RUNNING)
    if control is None:
        return
    _move_open(state, event.engine, State.HELD, Move.CONTINUE)
    state.fleet.health.of(event.engine).silence = 0.0
    if control.flushed:
        for request in state.in_flight.open_requests(event.engine):
            request.pending_prefill = request.rollout.computed_tokens
            state.fleet.health.of(event.engine).pending_prefill += request.pending_prefill


def on_hold_changed(state: SchedulerState, event: ev.HoldChanged) -> None:
    state.fleet.held = event.held


def on_control_failed(state: SchedulerState, event: ev.ControlFailed) -> None:
    control = state.fleet.control.of(event.engine)
    if control is not None:
        state.tell(facts.ControlCallFailed(engine=event.engine, call=event.call, cause=event.cause))
    before = (
        f"{control.broken_connection}; then "
        if control is not None and control.broken_connection
        else ""
    )
    lose(state, event.engine, f"{before}{event.call} failed: {event.cause}")


def on_engine_lost(state: SchedulerState, event: ev.EngineLost) -> None:
    lose(state, event.engine, event.cause)


def lose(state: SchedulerState, engine: str, cause: str) -> None:
    """Quarantine an engine. Its requests go on elsewhere with all tokens known so far."""
    control = state.fleet.control
    if control.of(engine) is None:
        return
    last = not (control.engines.keys() | control.standby.keys()) - {engine}
    lost = facts.EngineLost(engine=engine, cause=cause, last=last)
    state.tell(lost)
    broken = _leave(state, engine, cause)
    del control.standby[engine]
    state.weights.adapters.pop(engine, None)
    note_loss(state, engine, cause)
    # Its requests are back before the shell ends its streams.
    state.commands.append(lost)
    _count_interruptions(state, broken, f"{engine} was lost: {cause}")


def demote(state: SchedulerState, engine: str, cause: str) -> None:
    """Put an engine on standby: it answers, but does not have the fleet's weights."""
    lost = facts.EngineLost(engine=engine, cause=cause, standby=True)
    state.tell(lost)
    _leave(state, engine, cause)
    state.commands.append(lost)


def _leave(state: SchedulerState, engine: str, cause: str) -> list[RequestRecord]:
    """Take an engine out of use. Its record moves to those on standby. Returns the requests that
    it had."""
    control = state.fleet.control.engines.pop(engine, None)
    if control is not None:
        state.fleet.control.standby[engine] = control
        state.fleet.control.touch(engine)
        state.weights.versions.note(engine, None)
    requests = list(state.in_flight.open_requests(engine))
    for request in requests:
        state.in_flight.close_attempt(request, None)
        state.tell(facts.AttemptEnded(request_id=request.request_id, outcome="engine_lost"))
        request.shun(engine)
        take_back(state, request)
    if state.weights.update is not None:
        state.weights.update.answers.setdefault(engine, (None, cause))
    return requests


def _count_interruptions(state: SchedulerState, requests: list[RequestRecord], cause: str) -> None:
    """Count an interruption of each request, and lose the members whose request is given up.

    This comes after all requests are back, because siblings of a dropped rollout must not be called
    back from the engine that is gone."""
    for request in requests:
        exhausted = count_interruption(request, state.config, cause)
        if exhausted and request.request_id in state.in_flight.requests:
            lose_member(state, request.rollout, Reason.FAILED, exhausted)


def _move_open(state: SchedulerState, engine: str, where: State, move: Move) -> None:
    for request in state.in_flight.open_requests(engine):
        if request.rollout.state is where:
            request.rollout.move(move)


# --- health --------------------------------------------------------------------------------------

# Finds silent and slow engines at each tick (:mod:`aprilsched.kernel.core.state.engine_health`).
#
# Both are lost like an engine whose connection broke: their requests go on elsewhere with their
# tokens, and the engine may come back later. An engine that cannot be compared with another one is
# never lost for being slow, because going on slowly is better than not going on.


def on_tick(state: SchedulerState, _: ev.Tick) -> None:
    seconds = state.fleet.health.tick(state.now)
    for control in list(state.fleet.control.engines.values()):
        engine, health = control.name, state.fleet.health.of(control.name)
        waiting = state.in_flight.open[engine]
        state.note_work(engine)
        if control.mode is not Mode.RUNNING or not waiting or _is_paused_elsewhere(state, control):
            health.silence = 0.0
            continue
        health.silence += seconds
        if health.silence >= state.config.health.stall_s and _stalled(state, engine, health):
            requests = "1 open request" if waiting == 1 else f"{waiting} open requests"
            lose(state, engine, f"no token for {health.silence:.0f} s from {requests}")
        elif (window := health.window(state.now)) is not None:
            _compare_rates(state, engine, health, window)


def _is_paused_elsewhere(state: SchedulerState, control: EngineControl) -> bool:
    """Whether somebody else has paused the engine, for no longer than an update may take."""
    since = control.paused_elsewhere
    return since is not None and state.now - since < state.config.timeouts.refit_s


def _stalled(state: SchedulerState, engine: str, health: EngineHealth) -> bool:
    """Whether the engine is silent for longer than the timeout and the prefill of all requests that
    it has not answered yet."""
    context = sum(
        request.rollout.computed_tokens
        for request in state.in_flight.open_requests(engine)
        if request.pending_prefill or not request.gained
    )
    return health.silence >= state.config.health.stall_s + context / PREFILL_TOKENS_PER_S


def _compare_rates(
    state: SchedulerState, engine: str, health: EngineHealth, window: Window
) -> None:
    if not window.rate:
        return  # a silent engine has a timeout of its own
    share, usual = state.config.health.slow_share, health.usual_at(window.octave)
    if window.fair is None or usual is None or window.fair >= share * usual:
        health.slow, health.reported = 0, False
        health.learn(window)
        return
    others = [name for name in state.fleet.control.engines if name != engine]
    median = state.fleet.health.median(others, state.now)
    if median is not None and window.fair >= share * median:
        # The whole fleet is slow, or has a load that it did not have before.
        health.slow = 0
        health.learn(window)
        return
    cause = f"{window.fair:.3g} tokens/s a request, where {usual:.3g} are usual for it"
    if median is None:
        health.learn(window)
        if not health.reported:
            health.reported = True
            state.announce(facts.EngineSlow(engine=engine, cause=cause))
        return
    health.slow += 1
    if health.slow >= SLOW_WINDOWS:
        lose(state, engine, f"slow: {cause} and {median:.3g} for the others")


# --- outage --------------------------------------------------------------------------------------

# Handles outages, in which no engine is in use: what is waited for, and what the trainer is told.
#
# Nothing in flight is lost in an outage. Requests wait with the tokens known so far, and an update
# waits for an engine that can take it. Once an engine is back with the fleet's version, everything
# goes on. Otherwise the outage ends in one of two ways:
#
# - There is no engine for ``health.fleet_wait_s``: the fleet is given up.
# - Engines are back without the fleet's weights, and these weights cannot be published again: the
#   calls that wait for tokens end with an error that says to publish a version, and the scheduler
#   continues after that.
#
# An evaluation has one version. If its engines are gone and only an update can continue the run,
# the evaluation is abandoned, because otherwise each of the two would wait for the other.

_SAY_AGAIN_S = 60.0
"""Seconds after which the caller is told again that the fleet is waited for."""
_REJOIN_S = 10.0
"""Seconds after the loss or the return of an engine in which another may come back with the
version."""
_KEPT = 8
"""Number of the latest causes that are kept; a fleet may have hundreds of engines."""


def note_loss(state: SchedulerState, engine: str, cause: str) -> None:
    """Note that an engine is lost."""
    state.fleet.rejoin_expected_until = state.now + _REJOIN_S
    state.fleet.lost.pop(engine, None)
    state.fleet.lost[engine] = cause
    if len(state.fleet.lost) > _KEPT:
        del state.fleet.lost[next(iter(state.fleet.lost))]


def note_join(state: SchedulerState, engine: str) -> None:
    """Note that an engine has joined or is back."""
    state.fleet.rejoin_expected_until = state.now + _REJOIN_S
    state.fleet.lost.pop(engine, None)


def stranded(state: SchedulerState) -> bool:
    """Whether nothing can be generated before the trainer publishes a version."""
    return state.weights.update is None and state.fleet.sleep is None and _needs_update(state)


def attend(state: SchedulerState) -> None:
    """Note the beginning and the end of an outage, and tell the caller about it while it lasts."""
    if state.fleet.control.engines:
        state.fleet.outage = None
        return
    if state.fleet.outage is None:
        state.fleet.outage = Outage()
    if not state.fleet.control.standby:
        _await(state, state.fleet.outage)
    elif _needs_update(state):
        _want_update(state)


def _needs_update(state: SchedulerState) -> bool:
    control = state.fleet.control
    if control.engines or not control.standby or state.now < state.fleet.rejoin_expected_until:
        return False
    return not any(engine.catching_up for engine in control.standby.values())


def _await(state: SchedulerState, outage: Outage) -> None:
    if outage.given_up:
        return
    now = state.now
    if outage.since is None:
        outage.since = now
    lost, waited = tuple(state.fleet.lost.items()), now - outage.since
    left = outage.since + state.config.health.fleet_wait_s - now
    if left <= 0:
        outage.given_up = True
        state.announce(facts.FleetGivenUp(lost=lost, waited_s=waited))
    elif outage.said_at is None or now - outage.said_at >= _SAY_AGAIN_S:
        outage.said_at = now
        state.announce(facts.FleetAwaited(lost=lost, waited_s=waited, left_s=left))


def _want_update(state: SchedulerState) -> None:
    batch = state.delivery.takes_parts and state.collecting and stranded(state)
    update = state.weights.update
    begun = update is not None and update.phase is not UpdatePhase.WAITING
    abandoned = () if begun else tuple(state.evaluations.running)
    if not (batch or abandoned):
        return
    engines = tuple(state.fleet.control.standby)
    for evaluation_id in abandoned:
        cause = f"{', '.join(engines)} came back without the version that it was of"
        for group in state.evaluations.running.pop(evaluation_id):
            if group.dropped is None:
                drop(state, group, Reason.ABANDONED, cause)
    if batch:
        state.delivery.demand = Demand.LEFT
    state.announce(
        facts.UpdateWanted(
            engines=engines,
            version=state.weights.versions.trainer,
            batch=batch,
            evaluations=abandoned,
            base=state.weights.adapters_base,
        )
    )
