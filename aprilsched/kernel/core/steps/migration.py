"""Moves requests from engines with a full KV pool to engines with room (``dispatch.migrate``).

An engine with a full pool queues requests or retracts them: they lose their KV, which is recomputed
later. A queued request loses nothing by moving, because its context is prefilled once, here or
there. Requests without a token of the current attempt therefore move first, then those with the
fewest tokens, until they cover the engine's surplus of tokens. A request keeps its tokens and moves
once. Its new engine must also have room for the tokens that it is expected to need, because a pool
that fills up a moment later does not help.

Nothing moves if prefilling the context takes longer than decoding the expected rest, or if every
pool is full. Rolling refits move requests separately.

Engines that report their load also report how full their pool is
(:class:`~aprilsched.kernel.core.messages.events.LoadSeen`): the pool contains what siblings share
once, and other clients may use it too. Changes since the report are estimated from the contexts of
open requests, and so is the whole load of engines without reports. If requests wait on an engine,
that number of requests moves away, and none moves there.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.state import Fleet, PoolReport, SchedulerState
from aprilsched.kernel.core.steps.batch import training_runs
from aprilsched.kernel.core.steps.drop import abort

_CROWDED = 0.8
"""Pool share from which an engine may queue requests. SGLang reserves room for the future tokens of
running requests."""
_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of an engine. A pool takes many seconds to fill, and a check on every
chunk of a full engine would take more time than everything else."""
_FULL = 0.95
"""Pool share from which no more requests are sent to an engine. Its current requests need the rest
for their next tokens."""
_FRESH_S = 3.0
"""Seconds for which a report is valid. A paused engine sends no reports."""


def on_load_seen(state: SchedulerState, event: ev.LoadSeen) -> None:
    if event.engine in state.fleet.control.engines:
        state.fleet.pools[event.engine] = PoolReport(
            used=event.used,
            queued=event.queued,
            attempt_tokens=state.in_flight.held_on[event.engine],
            at=state.now,
        )
        if event.queued and state.config.dispatch.migrate:
            note_crowding(state.in_flight, state.fleet, state.now, event.engine)


def note_crowding(in_flight: InFlight, fleet: Fleet, now: float, engine: str) -> None:
    """Check the pool of an engine that has received tokens."""
    control = fleet.control.engines.get(engine)
    if control is None or control.able.kv_tokens is None:
        return
    examined_at = fleet.examined_at.get(engine, -_CHECK_INTERVAL_S)
    report = report_of(fleet, now, engine)
    waits = report is not None and report.queued > 0
    full = waits or filled(in_flight, fleet, now, engine) > _CROWDED * control.able.kv_tokens
    if full and now - examined_at >= _CHECK_INTERVAL_S:
        fleet.examined_at[engine] = now
        fleet.crowded_engines.add(engine)


def migrate(state: SchedulerState) -> None:
    """Abort requests on crowded engines, each to be sent to an engine with room."""
    crowded_engines, state.fleet.crowded_engines = state.fleet.crowded_engines, set()
    if not crowded_engines or not training_runs(state):
        return
    prices, rooms = state.config.prices, None
    for engine in sorted(crowded_engines):
        control = state.fleet.control.engines.get(engine)
        if control is None or control.able.kv_tokens is None:
            continue
        surplus = filled(state.in_flight, state.fleet, state.now, engine) - control.able.kv_tokens
        requests = [r for r in state.in_flight.open_requests(engine) if not r.aborting]
        # Requests that are already aborted will free their room soon.
        surplus -= sum(
            r.rollout.computed_tokens for r in state.in_flight.open_requests(engine) if r.aborting
        )
        requests.sort(key=lambda r: (r.gained, r.rollout.computed_tokens, -r.request_id))
        report = report_of(state.fleet, state.now, engine)
        waiting = report.queued if report is not None and report.queued else len(requests)
        for request in requests:
            if request.gained and surplus <= 0:
                break
            if not request.gained and waiting <= 0:
                continue
            if request.moved or not request.rollout.group.in_training:
                continue
            rest = float(state.expectations.work([request])[0])
            # Moving pays only if prefilling the context takes less time than decoding the rest.
            prefill = request.rollout.computed_tokens / prices.prefill_tokens_per_s
            if prefill >= rest * prices.step_seconds:
                continue
            # Most checks move nothing, and this one visits every engine.
            rooms = _rooms(state.in_flight, state.fleet, state.now) if rooms is None else rooms
            _, roomiest = max(zip(rooms.values(), rooms, strict=True), default=(0.0, ""))
            needed = request.rollout.computed_tokens + rest
            if not roomiest or roomiest == engine or rooms[roomiest] < needed:
                break
            rooms[roomiest] -= needed
            surplus -= request.rollout.computed_tokens
            waiting -= not request.gained
            request.destination, request.moved = roomiest, True
            state.fleet.moving.add(request.request_id)
            abort(state.in_flight, state.out, request)


def report_of(fleet: Fleet, now: float, engine: str) -> PoolReport | None:
    """Return the engine's latest pool report, or None if it is no longer valid."""
    report = fleet.pools.get(engine)
    return None if report is None or now - report.at > _FRESH_S else report


def filled(in_flight: InFlight, fleet: Fleet, now: float, engine: str) -> int:
    """Return the number of tokens in the engine's pool: its last report plus changes since."""
    held, report = in_flight.held_on[engine], report_of(fleet, now, engine)
    return held if report is None else report.used + held - report.attempt_tokens


def _rooms(in_flight: InFlight, fleet: Fleet, now: float) -> dict[str, float]:
    """Return how many tokens each engine can take, less those on their way to it."""
    rooms: dict[str, float] = {}
    for name, control in fleet.control.engines.items():
        if control.able.kv_tokens is None:
            continue
        if name not in fleet.pools:
            rooms[name] = _FULL * control.able.kv_tokens - in_flight.held_on[name]
            continue
        report = report_of(fleet, now, name)
        if report is None or not report.queued:
            rooms[name] = _FULL * control.able.kv_tokens - filled(in_flight, fleet, now, name)
    for request_id in sorted(fleet.moving):
        request = in_flight.requests.get(request_id)
        if request is None or not request.destination:
            fleet.moving.remove(request_id)
        elif request.destination in rooms:
            rooms[request.destination] -= request.rollout.computed_tokens
    return rooms
