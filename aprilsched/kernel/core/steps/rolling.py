"""Frees engines of older versions, so that each takes the newest one alone (rolling refits).

A rollout is pinned to one version, which is that of its first token. A request with tokens is sent
only to an engine of this version, and a rollout without tokens only to an engine of the trainer's
version. So an engine of an older version gets no new rollouts. It becomes free when its last
response has ended, or when its requests are moved to other engines of its version
(:mod:`aprilsched.kernel.core.policies.repack`). Such requests are aborted before any pause and
return with their tokens. Then :func:`aprilsched.kernel.core.steps.refit.catch_up` brings the engine
to the version that is newest by then, while the other engines keep running.

An engine of an old version stays as long as rollouts of that version may need it: those that wait
to be sent, and episodes between two turns. If the last engine of a version is lost nevertheless,
its rollouts restart under the newest version, and their tokens are in the ledger. An episode has
acted on its tokens, so it is a lost member (:mod:`aprilsched.kernel.core.steps.members`).
"""

from __future__ import annotations

from aprilsched.kernel.core.policies.repack import LOOK_AGAIN, Load, is_worth_freeing, surplus
from aprilsched.kernel.core.state.engine_control import EngineControl, Mode
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import RequestRecord, State
from aprilsched.kernel.core.state.state import Fleet, SchedulerState
from aprilsched.kernel.core.steps.batch import training_runs
from aprilsched.kernel.core.steps.drop import abort
from aprilsched.kernel.core.steps.engines import demote
from aprilsched.kernel.core.steps.episode_replay import truncate
from aprilsched.kernel.core.steps.members import lose_member
from aprilsched.kernel.core.steps.refit import all_stop


def roll(state: SchedulerState) -> None:
    """Restart rollouts that no engine can continue, and free engines of older versions."""
    if not state.rolling:
        return
    _begin_again(state)
    if all_stop(state.fleet, state.weights, state.rolling):
        _leave_to_the_fleet(state.fleet)
    elif state.weights.versions.mixed:
        _free(state)


def _begin_again(state: SchedulerState) -> None:
    versions, queue = state.weights.versions, state.in_flight.queue
    # Engines of older versions will take the trainer's, so rollouts of that version just wait.
    older = queue.versions() - {None, versions.trainer}
    if not older or not versions.engines:
        return
    lost = older.difference(versions.present)
    for version in sorted(v for v in lost if v is not None):
        for request in queue.of_version(version):
            if request.request_id in queue:
                _restart(state, request)


def _restart(state: SchedulerState, request: RequestRecord) -> None:
    rollout = request.rollout
    if state.caller.episodes:
        cause = "no engine has the version of its tokens"
        lose_member(state, rollout, Reason.VERSION_LOST, cause)
        return
    queue = state.in_flight.queue
    queue.discard(request)
    truncate(state.in_flight, state.out, rollout, 0, Reason.VERSION_LOST)
    rollout.log.exact, rollout.log.stale_keys = True, False
    queue.add(request)


def _leave_to_the_fleet(fleet: Fleet) -> None:
    """Release the engines that are not being refitted to a sleep or an update of all engines."""
    index = fleet.index
    index.refresh()
    leaving = [
        control
        for kind, controls in index.kinds.items()
        if kind.leaves and kind.mode is not Mode.REFITTING
        for control in controls.values()
    ]
    for control in leaving:
        _stay(fleet, control)


def _free(state: SchedulerState) -> None:
    versions, index, fleet = state.weights.versions, state.fleet.index, state.fleet.control
    index.refresh()
    for version in sorted(set(versions.present) - {versions.trainer}):
        busy = len(index.busy(version))
        idle, leaving = _of(state, version, leaves=False), _of(state, version, leaves=True)
        # While an engine of this version is busy, it stays anyway.
        needed = not busy and bool(idle or leaving) and _is_needed(state, version)
        if needed and not idle:
            # The engine that should have taken its rollouts is lost.
            _stay(state.fleet, index.in_order(leaving)[-1])
            index.refresh()
            busy = len(index.busy(version))
            idle, leaving = _of(state, version, leaves=False), _of(state, version, leaves=True)
        for control in leaving:
            if control.mode is Mode.RUNNING and not state.in_flight.open[control.name]:
                fleet.touch(control.name)
        # Before a sleep only evaluations are sent, and the sleep waits for them. So rollouts that
        # wait for this version restart if no other engine can take the evaluations' version.
        stuck = idle and not training_runs(state) and _wants_newest(state)
        for control in index.in_order(idle)[int(needed and not busy and not stuck) :]:
            _go(state, control)
        if state.weights.republishable:
            _gather(state, version, busy)


def _of(state: SchedulerState, version: int, *, leaves: bool) -> list[EngineControl]:
    """Return the leaving or the idle engines of a version that are not being refitted."""
    return [
        control
        for kind, controls in state.fleet.index.kinds.items()
        if kind.version == version and kind.leaves == leaves and kind.mode is not Mode.REFITTING
        if leaves or kind.idle
        for control in controls.values()
    ]


def _is_needed(state: SchedulerState, version: int) -> bool:
    """Return whether rollouts that are not on a staying engine need this version."""
    in_flight = state.in_flight
    if version in in_flight.queue.versions() or state.fleet.index.requests[version, True]:
        return True
    return state.caller.episodes and any(
        rollout.state is State.THINKING and rollout.log.oldest_version == version
        for rollout in in_flight.rollouts.values()
    )


def _gather(state: SchedulerState, version: int, busy: int) -> None:
    """Move the requests of one `busy` engine to others of its version, if that pays off."""
    in_flight, index = state.in_flight, state.fleet.index
    rejected = state.stragglers.rejected_surplus
    fleet = state.fleet.control.engines
    requests = index.requests[version, False] + index.requests[version, True]
    requests += in_flight.queue.count_of(version)
    share = (in_flight.open_attempts + len(in_flight.queue)) / len(fleet)
    needed = _wants_newest(state)
    over = surplus(engines=busy, requests=requests, share=share)
    if not needed and over < rejected.get(version, 0.0) + LOOK_AGAIN:
        return
    rejected[version] = over
    least = index.busy(version).least()
    if least is None or busy < 2:
        return
    if is_worth_freeing(
        _load(state, fleet[least]),
        lambda: [_load(state, fleet[name]) for name in index.busy(version).loads if name != least],
        engines=busy,
        requests=requests,
        share=share,
        prices=state.config.prices,
        needed=needed,
    ):
        rejected[version] = 0.0
        _go(state, fleet[least])
        for request in in_flight.open_requests(least):
            abort(state.in_flight, state.out, request)


def _wants_newest(state: SchedulerState) -> bool:
    """Return whether evaluation requests need the trainer's version and no engine will have it.

    An engine will have it if it has the version already or is about to load it.
    """
    versions, control = state.weights.versions, state.fleet.control
    if state.in_flight.queue.first(training=False) is None:
        return False
    if versions.trainer in versions.present:
        return False
    return not any(engine.catching_up for engine in control.all())


def _load(state: SchedulerState, control: EngineControl) -> Load:
    in_flight, expected = state.in_flight, state.expectations

    def remaining() -> float:
        requests = list(in_flight.open_requests(control.name))
        return sum(map(expected.remaining, requests)) / len(requests)

    return Load(
        engine=control.name,
        requests=in_flight.open[control.name],
        room=state.fleet.health.of(control.name).max_running,
        kv_tokens=control.able.kv_tokens,
        contexts=lambda: in_flight.held_on[control.name],
        remaining=remaining,
    )


def _go(state: SchedulerState, control: EngineControl) -> None:
    """Let an engine take the newest version as soon as it has no open requests.

    If that version cannot be published again, as after a restart, the engine stands by for the next
    one.
    """
    if state.weights.republishable:
        control.catching_up = True
        state.fleet.control.touch(control.name)
    else:
        version = state.weights.versions.engines[control.name]
        demote(state, control.name, f"its version {version} is no longer used")


def _stay(fleet: Fleet, control: EngineControl) -> None:
    control.catching_up = False
    fleet.control.touch(control.name)
