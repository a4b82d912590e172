"""Sends waiting requests to engines.

:func:`~aprilsched.kernel.core.policies.placement.choose_engine` chooses the engine of a request
among those that are running, verified and not full.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.policies.placement import (
    Preference,
    choose_engine,
    preference_of,
    rank_of,
)
from aprilsched.kernel.core.state.records import RequestRecord
from aprilsched.kernel.core.state.state import Fleet, SchedulerState
from aprilsched.kernel.core.state.weights import Weights
from aprilsched.kernel.core.steps.batch import training_runs
from aprilsched.kernel.core.steps.sessions import admits, start_session_turn
from aprilsched.kernel.core.steps.steering import goal
from aprilsched.kernel.core.steps.verification import awaits_answers, verify

_CANDIDATES = 8
"""Number of the least loaded engines that are asked for room for a session. All engines of a large
fleet would take milliseconds after each event."""


def place(state: SchedulerState) -> None:
    """Send waiting requests to engines, but never to a paused one (hazard 4)."""
    queue, index, fleet = state.in_flight.queue, state.fleet.index, state.fleet
    if not queue or goal(state).kind != "run":
        fleet.verifying_since = None
        return
    training = training_runs(state)
    index.refresh()
    versions = _served_versions(state.fleet, state.weights, state.rolling)
    if queue.first(training=training, versions=versions) is None:
        fleet.verifying_since = None
        return
    full = _full(state, fleet.admissions)
    unverified = verify(state, full=full)
    if awaits_answers(state.fleet, state.weights, state.rolling):
        return
    fleet.verifying_since = None
    index.leave_out(unverified | full)
    limit, cold = state.config.dispatch.max_in_flight, True
    while limit is None or state.in_flight.open_attempts < limit:
        request = queue.first(training=training, versions=versions, cold=cold)
        if request is None:
            return
        waits_for = queue.version_of(request)
        version = state.weights.versions.trainer if waits_for is None else waits_for
        loads = index.accepting(version)
        engine = choose_engine(loads, _preference(state, request), avoid=request.avoid)
        if engine is not None and queue.is_cold(request) and not admits(state, request, engine):
            rest = ((load, name) for name, load in loads.loads.items() if name not in request.avoid)
            least = (name for _, name in heapq.nsmallest(_CANDIDATES, rest))
            engine = next((name for name in least if admits(state, request, name)), None)
            if engine is None:
                cold = False
                continue
        if engine is not None:
            loads.add_request(engine)
            _send(state, request, engine)
            if engine in fleet.admissions and _full(state, [engine]):
                loads.put(engine, None)
        elif versions is None:
            return
        else:
            versions.discard(waits_for)


def _served_versions(fleet: Fleet, weights: Weights, rolling: bool) -> set[int | None] | None:
    """Return the versions of waiting requests that some engine may take; None for all."""
    if not rolling:
        return None
    served: set[int | None] = {k.version for k in fleet.index.kinds if not k.leaves}
    return served | {None} if weights.versions.trainer in served else served


def _preference(state: SchedulerState, request: RequestRecord) -> Preference | None:
    """Return the preferred engine of a request, or None if it makes no difference."""
    rollout = request.rollout
    return preference_of(
        state.placement,
        destination=request.destination,
        avoid=request.avoid,
        context_engine=state.in_flight.context_engine(rollout),
        members=len(rollout.group.members),
        shares_context=bool(rollout.turns) or rollout.group.prompt.affinity is not None,
    )


def _full(state: SchedulerState, engines: Iterable[str]) -> set[str]:
    """Return those of the busy `engines` that would refuse a request now."""
    admissions, opened = state.fleet.admissions, state.in_flight.open
    return {name for name in engines if admissions[name].is_full(state.now, opened[name])}


def _cache_key(state: SchedulerState, engine: str) -> str | None:
    """Return the key of the KV that a request may find on the engine; None for all of it.

    The key names one load of weights into one engine, not just a version. A restarted server or
    another client may have computed KV with other weights under the same version before this is
    detected.
    """
    versions, stores = state.weights.versions, state.fleet.control.engines[engine].able.stores_kv
    if state.cached_kv == "apart" or (state.cached_kv == "recompute" and stores):
        return f"{versions.engines[engine]}-{versions.loads[engine]}"
    return "kept" if stores else None


def _send(state: SchedulerState, request: RequestRecord, engine: str) -> None:
    version, key = state.weights.versions.engines[engine], _cache_key(state, engine)
    rank = rank_of(
        training=request.rollout.group.evaluation_id is None, carried=request.rollout.carried
    )
    state.note_work(engine)
    if state.caller.episodes:
        start_session_turn(state, request)
    state.in_flight.open_attempt(request, engine, version=version, adapter=state.weights.adapter)
    state.fleet.attempts_sent += 1
    request.sent = state.fleet.attempts_sent
    rollout = request.rollout
    context = rollout.context()
    sampling = request.sampling.after(request.generated)
    state.out.tell(
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
    state.out.commands.append(
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
