"""Moves requests from an engine whose KV pool is full to one with room (``dispatch.migrate``).

An engine whose pool is full lets requests wait, or retracts them: they lose their keys and are
computed again later. A request that waits there loses nothing by moving, because its context is
prefilled once, here or there. So those move that have no token of this attempt yet, and of the
others those with the fewest tokens, as many as the engine has too many tokens for. A request
keeps its tokens, moves once, and goes only where the tokens that it is expected to need still
have room too, because a pool that would be full a moment later is no better.

It is not worth it where prefilling the context takes longer than decoding what is expected to
come, and where every pool is full: then nothing moves. Rolling refits move requests on their own.

How full a pool is, its engine says (:class:`~aprilsched.kernel.core.messages.events.LoadSeen`), as
far as it reports its load: what siblings share is in the pool once, and other clients may use it
too. What has come and gone since is counted by the contexts of open requests, and so is everything
on engines that do not report it. Where requests wait, as many move as wait there, and none comes.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.state.state import PoolReport, SchedulerState
from aprilsched.kernel.core.steps.batch import training_runs
from aprilsched.kernel.core.steps.drop import abort

_CROWDED = 0.8
"""Share of a pool from which an engine may let requests wait. SGLang leaves room for what the
running ones will need."""
_LOOK_S = 1.0
"""Seconds between two looks at an engine. A pool fills in many seconds, and a look at every chunk
of a full engine would take more time than all else."""
_FULL = 0.95
"""Share of a pool from which it is filled no further from outside. What its own requests generate
next needs the rest."""
_FRESH_S = 3.0
"""Seconds for which a report counts. An engine that is paused reports nothing."""


def on_load_seen(state: SchedulerState, event: ev.LoadSeen) -> None:
    if event.engine in state.fleet.control.engines:
        state.fleet.pools[event.engine] = PoolReport(
            used=event.used,
            queued=event.queued,
            held=state.in_flight.held_on[event.engine],
            at=state.now,
        )
        if event.queued:
            note_crowding(state, event.engine)


def note_crowding(state: SchedulerState, engine: str) -> None:
    """Look at an engine that has got tokens."""
    control = state.fleet.control.engines.get(engine)
    if control is None or control.kv_tokens is None:
        return
    looked = state.fleet.looked_at.get(engine, -_LOOK_S)
    report = _report(state, engine)
    waits = report is not None and report.queued > 0
    full = waits or _filled(state, engine) > _CROWDED * control.kv_tokens
    if full and state.now - looked >= _LOOK_S:
        state.fleet.looked_at[engine] = state.now
        state.fleet.crowded.add(engine)


def migrate(state: SchedulerState) -> None:
    """Call requests of crowded engines back, each for an engine that has room."""
    crowded, state.fleet.crowded = state.fleet.crowded, set()
    if not crowded or not training_runs(state):
        return
    prices, rooms = state.config.prices, None
    for engine in sorted(crowded):
        control = state.fleet.control.engines.get(engine)
        if control is None or control.kv_tokens is None:
            continue
        surplus = _filled(state, engine) - control.kv_tokens
        requests = [r for r in state.in_flight.open_requests(engine) if not r.aborting]
        # What was called back already gives its room soon.
        surplus -= sum(
            r.rollout.computed_tokens for r in state.in_flight.open_requests(engine) if r.aborting
        )
        requests.sort(key=lambda r: (r.gained, r.rollout.computed_tokens, -r.request_id))
        report = _report(state, engine)
        waiting = report.queued if report is not None and report.queued else len(requests)
        for request in requests:
            if request.gained and surplus <= 0:
                break
            if not request.gained and waiting <= 0:
                continue
            if request.moved or not request.rollout.group.in_training:
                continue
            rest = float(state.expectations.work([request])[0])
            # It moves only if prefilling its context takes less time than decoding the rest.
            prefill = request.rollout.computed_tokens / prices.prefill_tokens_per_s
            if prefill >= rest * prices.step_seconds:
                continue
            # Most looks move nothing, and this one looks at every engine.
            rooms = _rooms(state) if rooms is None else rooms
            _, roomiest = max(zip(rooms.values(), rooms, strict=True), default=(0.0, ""))
            needed = request.rollout.computed_tokens + rest
            if not roomiest or roomiest == engine or rooms[roomiest] < needed:
                break
            rooms[roomiest] -= needed
            surplus -= request.rollout.computed_tokens
            waiting -= not request.gained
            request.destination, request.moved = roomiest, True
            state.fleet.moving.add(request.request_id)
            abort(state, request)


def _report(state: SchedulerState, engine: str) -> PoolReport | None:
    """What the engine has reported just now of its pool."""
    report = state.fleet.pools.get(engine)
    return None if report is None or state.now - report.at > _FRESH_S else report


def _filled(state: SchedulerState, engine: str) -> int:
    """Number of tokens in the engine's pool: those that it has reported, and what has come and gone
    since."""
    held, report = state.in_flight.held_on[engine], _report(state, engine)
    return held if report is None else report.used + held - report.held


def _rooms(state: SchedulerState) -> dict[str, float]:
    """Number of tokens that each engine can take, with those that are on their way to it."""
    rooms: dict[str, float] = {}
    in_flight = state.in_flight
    for name, control in state.fleet.control.engines.items():
        if control.kv_tokens is None:
            continue
        if name not in state.fleet.pools:
            rooms[name] = _FULL * control.kv_tokens - in_flight.held_on[name]
            continue
        report = _report(state, name)
        if report is None or not report.queued:
            rooms[name] = _FULL * control.kv_tokens - _filled(state, name)
    for request_id in sorted(state.fleet.moving):
        request = in_flight.requests.get(request_id)
        if request is None or not request.destination:
            state.fleet.moving.remove(request_id)
        elif request.destination in rooms:
            rooms[request.destination] -= request.rollout.computed_tokens
    return rooms
