"""Moves requests from an engine whose KV pool is full to one with room (``dispatch.migrate``).

An engine whose pool is full lets requests wait, or retracts them: they lose their keys and are
computed again later. A request that waits there loses nothing by moving, because its context is
prefilled once, here or there. So those move that have no token of this attempt yet, and of the
others those with the fewest tokens, as many as the engine has too many tokens for. A request
keeps its tokens, moves once, and goes only where the tokens that it is expected to need still
have room too, because a pool that would be full a moment later is no better.

It is not worth it where prefilling the context takes longer than decoding what is expected to
come, and where every pool is full: then nothing moves. Rolling refits move requests on their own.
"""

from __future__ import annotations

from aprilsched.core.state.records import RequestRecord
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.batch import training_runs
from aprilsched.core.steps.drop import abort

__all__ = ["migrate", "note_crowding"]

_CROWDED = 0.8
"""Share of a pool from which an engine may let requests wait. SGLang leaves room for what the
running ones will need."""
_LOOK_S = 1.0
"""Seconds between two looks at an engine. A pool fills in many seconds, and a look at every chunk
of a full engine would take more time than all else."""
_FULL = 0.95
"""Share of a pool from which it is filled no further from outside. What its own requests generate
next needs the rest."""


def note_crowding(state: SchedulerState, engine: str) -> None:
    """Look at an engine that has got tokens."""
    control = state.fleet.control.engines.get(engine)
    if control is None or control.kv_tokens is None:
        return
    looked = state.fleet.looked_at.get(engine, -_LOOK_S)
    full = state.in_flight.held_on[engine] > _CROWDED * control.kv_tokens
    if full and state.now - looked >= _LOOK_S:
        state.fleet.looked_at[engine] = state.now
        state.fleet.crowded.add(engine)


def migrate(state: SchedulerState) -> None:
    """Call requests of crowded engines back, each for an engine that has room."""
    crowded, state.fleet.crowded = state.fleet.crowded, set()
    if not crowded or state.rolling or not training_runs(state):
        return
    rooms = _rooms(state)
    for engine in sorted(crowded):
        control = state.fleet.control.engines.get(engine)
        if control is None or control.kv_tokens is None:
            continue
        surplus = state.in_flight.held_on[engine] - control.kv_tokens
        requests = [r for r in state.in_flight.open_requests(engine) if not r.aborting]
        # What was called back already gives its room soon.
        surplus -= sum(_context(r) for r in state.in_flight.open_requests(engine) if r.aborting)
        requests.sort(key=lambda r: (r.gained, _context(r), -r.request_id))
        for request in requests:
            if request.gained and surplus <= 0:
                break
            if not _may_move(request):
                continue
            rest = float(state.expectations.work([request])[0])
            if not _pays(state, request, rest):
                continue
            roomiest = max(rooms, key=lambda name: (rooms[name], name), default="")
            needed = _context(request) + rest
            if not roomiest or roomiest == engine or rooms[roomiest] < needed:
                break
            rooms[roomiest] -= needed
            surplus -= _context(request)
            request.destination, request.moved = roomiest, True
            abort(state, request)


def _rooms(state: SchedulerState) -> dict[str, float]:
    """Number of tokens that each engine can take, with those that are on their way to it."""
    rooms: dict[str, float] = {}
    in_flight = state.in_flight
    for name, control in state.fleet.control.engines.items():
        if control.kv_tokens is not None:
            rooms[name] = _FULL * control.kv_tokens - in_flight.held_on[name]
    for request in in_flight.requests.values():
        if request.destination in rooms:
            rooms[request.destination] -= _context(request)
    return rooms


def _may_move(request: RequestRecord) -> bool:
    group = request.rollout.group
    return not request.moved and group.evaluation_id is None and group.dropped is None


def _pays(state: SchedulerState, request: RequestRecord, rest: float) -> bool:
    """Whether prefilling the context elsewhere takes less time than decoding the rest does."""
    prices = state.config.prices
    return _context(request) / prices.prefill_tokens_per_s < rest * prices.step_seconds


def _context(request: RequestRecord) -> int:
    return len(request.rollout.prompt_ids) + len(request.rollout.log)
