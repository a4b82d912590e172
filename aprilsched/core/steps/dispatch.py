"""Decides what the engines should be doing, and which waiting request goes to which engine."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from aprilsched.core.messages import commands as do
from aprilsched.core.messages import facts
from aprilsched.core.policies.placement import rank_of
from aprilsched.core.state.engine_control import RUN, EngineControl, Goal, Mode
from aprilsched.core.state.records import RequestRecord, RolloutRecord
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.batch import training_runs
from aprilsched.core.steps.drop import abort

_AFFINE = 8
"""How many requests more than the least loaded engine the engine may have that has the context of
earlier turns, or of prompts with one affinity. Sending it elsewhere costs a prefill of the whole
context."""
_QUIET_S = 1.0
"""Seconds without requests after which an engine is asked for its version before it gets one. No
server restarts in less time."""


def interrupt(state: SchedulerState) -> None:
    """Call all open requests back when no training rollout should run, where the straggler policy
    says so.

    That is before any pause: a request that is aborted after a retract comes back without the
    tokens that were not streamed yet (hazard 1).
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
        abort(state, request)


def steer(state: SchedulerState) -> None:
    """Give the next control call of every engine that has not reached the goal."""
    calls = state.fleet.control.reconcile(
        _goal(state), idle=lambda name: not state.in_flight.open[name]
    )
    state.commands.extend(calls)


def dispatch(state: SchedulerState) -> None:
    """Send waiting requests to engines. Nothing is ever sent to a paused engine (hazard 4)."""
    in_flight, index = state.in_flight, state.fleet.index
    if not in_flight.queue or _goal(state).kind != "run":
        state.fleet.asking_since = None
        return
    training, limit = training_runs(state), state.config.dispatch.max_in_flight
    index.refresh()
    lanes = _lanes(state)
    if in_flight.queue.first(training=training, versions=lanes) is None:
        state.fleet.asking_since = None
        return
    full = _full(state)
    quiet = [control for control in _quiet(state) if control.name not in full]
    _ask_for_versions(state, quiet, full)
    if _awaited(state):
        return
    state.fleet.asking_since = None
    index.leave_out({control.name for control in quiet} | full)
    while limit is None or in_flight.open_attempts < limit:
        request = in_flight.queue.first(training=training, versions=lanes)
        if request is None:
            return
        lane = in_flight.queue.version_of(request)
        version = state.weights.versions.trainer if lane is None else lane
        prefer, slack = _preferred(state, request)
        engine = index.places(version).take(prefer=prefer, slack=slack, avoid=request.avoid)
        if engine is not None:
            _send(state, request, engine)
            if engine in _full(state, engine):
                index.places(version).put(engine, None)
        elif lanes is None:
            return
        else:
            lanes.discard(lane)


def _full(state: SchedulerState, engine: str | None = None) -> set[str]:
    """The engines that get nothing now because they would refuse it, or `engine` if it is one."""
    admissions = state.fleet.admissions
    names = admissions if engine is None else admissions.keys() & {engine}
    opened = state.in_flight.open
    return {name for name in names if admissions[name].is_full(state.now, opened[name])}


def _ask_for_versions(
    state: SchedulerState, quiet: Sequence[EngineControl], full: Set[str]
) -> None:
    for control in _worth_asking(state, quiet, full):
        if state.fleet.asking_since is None:
            state.fleet.asking_since = state.now
        state.fleet.control.enter(control, Mode.VERIFYING)
        state.commands.append(do.Verify(engine=control.name, generates=control.suspect))


def _preferred(state: SchedulerState, request: RequestRecord) -> tuple[str, float]:
    """The engine that a request should go to, and how many requests more than the least loaded one
    that may have; -1 where it makes no difference."""
    group = request.rollout.group
    if request.destination and request.destination not in request.avoid:
        return request.destination, math.inf  # it is on its way there
    if state.placement != "prefix":
        return group.engine, -1
    # A group stays on its engine while that has less than a group more to do than the others.
    slack = len(group.members)
    if request.rollout.turns or group.prompt.affinity is not None:
        slack = max(slack, _AFFINE)
    return _home(state, request.rollout), slack


def _home(state: SchedulerState, rollout: RolloutRecord) -> str:
    """The engine that has the context of the rollout's earlier turns in its cache, or the prompt of
    its group, or the context of its affinity."""
    group = rollout.group
    affinity = group.prompt.affinity
    if rollout.turns and rollout.engine:
        return rollout.engine
    return group.engine or ("" if affinity is None else state.in_flight.homes.get(affinity, ""))


def _lanes(state: SchedulerState) -> set[int | None] | None:
    """The versions of the waiting requests that some engine may take; None for all of them."""
    if not state.rolling:
        return None
    lanes: set[int | None] = {k.version for k in state.fleet.index.kinds if not k.leaves}
    return lanes | {None} if state.weights.versions.trainer in lanes else lanes


def _awaited(state: SchedulerState) -> bool:
    """Whether nothing is sent before some engine has answered."""
    state.fleet.index.refresh()
    modes = {kind.mode for kind in state.fleet.index.kinds if not kind.leaves}
    if state.rolling and (state.weights.update is None or state.weights.update.rolls):
        # An engine that continues alone, after its refit, holds nobody up.
        return Mode.VERIFYING in modes
    # Otherwise the first engine that continues after a pause would get the whole wave, or, if it
    # took only its share, all carried requests, which have the longest contexts.
    return any(mode is not Mode.RUNNING for mode in modes)


def _quiet(state: SchedulerState) -> list[EngineControl]:
    """The engines that take requests and may have been restarted without anybody noticing. They
    would answer with the weights that they were first started with, as if nothing had happened."""
    index = state.fleet.index
    # What has answered since they were asked is not asked again: the answers of a large fleet take
    # longer than the quiet time, so it would be asked for ever, and nothing would be sent.
    since = math.inf if state.fleet.asking_since is None else state.fleet.asking_since
    idle = [
        control
        for kind, controls in index.kinds.items()
        if kind.idle and kind.mode is Mode.RUNNING and not kind.leaves
        for control in controls.values()
        if control.doubt or state.now - control.version_seen_at > _QUIET_S
        if control.doubt or control.version_seen_at < since
    ]
    idle += [
        control
        for control in index.doubted.values()
        if control.doubt
        and control.mode is Mode.RUNNING
        and state.in_flight.open[control.name]
        and not control.catching_up
    ]
    return index.in_order(idle)


def _worth_asking(
    state: SchedulerState, quiet: Sequence[EngineControl], full: Set[str]
) -> list[EngineControl]:
    """Those of the `quiet` engines that are asked for their version before a request is sent.

    With fewer requests than quiet engines these are the ones that requests are to go to. In a
    large fleet some engines are always idle, and to ask all of them took more time than all tokens,
    and held every request up until the slowest had answered.
    """
    queue, trainer = state.in_flight.queue, state.weights.versions.trainer
    if len(queue) >= len(quiet):
        return list(quiet)
    asked: list[EngineControl] = []
    idle: dict[int, set[str]] = {}
    for kind, controls in state.fleet.index.kinds.items():
        if kind.idle and not kind.leaves:
            idle.setdefault(kind.version, set()).update(controls.keys() - full)
    versions = state.weights.versions.engines
    for version in sorted({versions[control.name] for control in quiet}):
        # An engine of another version takes none of these: counted as one that is ready for them,
        # it kept a request waiting for ever.
        lane = (version, None) if version == trainer else (version,)
        waiting = [
            request for request in queue if not state.rolling or queue.version_of(request) in lane
        ]
        unasked = [control for control in quiet if versions[control.name] == version]
        asked += _worth_asking_for(state, waiting, unasked, idle.get(version, set()))
    return asked


def _worth_asking_for(
    state: SchedulerState,
    waiting: Sequence[RequestRecord],
    quiet: Sequence[EngineControl],
    idle: Set[str],
) -> list[EngineControl]:
    near = state.placement == "prefix"
    homes, avoid = set[str](), set[str]()
    for request in waiting:
        avoid.update(request.avoid)
        if near:
            homes.add(_home(state, request.rollout))
    spare = len(idle - {control.name for control in quiet} - avoid)
    asked = [control for control in quiet if control.doubt or control.name in homes]
    others = [control for control in quiet if not (control.doubt or control.name in homes)]
    others.sort(key=lambda control: control.name in avoid)
    missing = max(0, len(waiting) - spare - len(asked))
    return asked + others[:missing]


def _cache_key(state: SchedulerState, engine: str) -> str | None:
    """The key of the KV that a request to the engine may find; None if all of it.

    It is of one load of weights into one engine and not only of a version: a restarted server or
    another client may have computed KV with other weights under the same version before that shows.
    """
    versions, stores = state.weights.versions, state.fleet.control.engines[engine].stores_kv
    if state.cached_kv == "apart" or (state.cached_kv == "recompute" and stores):
        return f"{versions.engines[engine]}-{versions.loads[engine]}"
    return "kept" if stores else None


def _send(state: SchedulerState, request: RequestRecord, engine: str) -> None:
    version, key = state.weights.versions.engines[engine], _cache_key(state, engine)
    rank = rank_of(
        training=request.rollout.group.evaluation_id is None,
        carried=request.rollout.carried,
    )
    state.note_work(engine)
    state.in_flight.open_attempt(request, engine, version=version, adapter=state.weights.adapter)
    state.fleet.attempts_sent += 1
    request.sent = state.fleet.attempts_sent
    rollout = request.rollout
    context = rollout.context()
    sampling = request.sampling.after(request.generated)
    state.tell(
        facts.AttemptSent(
            engine=engine,
            request_id=request.request_id,
            attempt=request.attempt,
            rollout_id=rollout.rollout_id,
            group_id=rollout.group.group_id,
            tokens=len(context),
            max_new_tokens=sampling.max_new_tokens,
            adapter=state.weights.adapter,
            cache_key=key,
            input_ids=context.tolist() if state.tells_tokens else None,
        )
    )
    state.fleet.health.sent(engine, len(context), alone=state.in_flight.open[engine] == 1)
    state.commands.append(
        do.Send(
            engine=engine,
            request_id=request.request_id,
            attempt=request.attempt,
            rollout_id=rollout.rollout_id,
            group_id=rollout.group.group_id,
            input_ids=context,
            sampling=sampling,
            adapter=state.weights.adapter,
            cache_key=key,
            companions=tuple(
                [(each.companion, each.held) for each in rollout.log.companions.values()]
            ),
            media=rollout.group.prompt.media if request.media is None else request.media,
            rank=rank,
        )
    )


def _goal(state: SchedulerState) -> Goal:
    """What the engines should be doing: run, pause, or pause ready for a refit."""
    update, sleep = state.weights.update, state.fleet.sleep
    if state.stragglers.calling_back:
        return RUN
    if update is not None and update.pauses:
        # Until an update may pause the engines, it waits for the requests in them to end.
        if not update.may_pause:
            return RUN
        return Goal(kind="refit", away=sleep.away_in_refit if sleep else frozenset())
    if sleep is not None and not sleep.waking:
        return Goal(kind="pause", away=sleep.away) if sleep.may_pause else RUN
    if not state.behaviour.waits_inside or state.evaluations.running or training_runs(state):
        return RUN
    return Goal(kind="pause")
