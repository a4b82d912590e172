"""Keeps the KV of sessions within the engines' pools (``dispatch.max_sessions``).

The rule is :func:`~aprilsched.kernel.core.policies.sessions.may_start`. The core expects each
engine to keep KV as its cache does, and corrects this by the engine's reports.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.policies.sessions import TURNS_AHEAD, may_start, share_after
from aprilsched.kernel.core.state.records import GENERATING, RequestRecord, RolloutRecord
from aprilsched.kernel.core.state.session_kv import SessionPool
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.steps import migration
from aprilsched.kernel.core.steps.migration import filled, report_of

_NEW = 0.2
"""Weight of the latest report in the share of tokens that contexts do not have in common."""


def on_load_seen(state: SchedulerState, event: ev.LoadSeen) -> None:
    """Correct what is expected of an engine's pool by the engine's report."""
    migration.on_load_seen(state, event)
    if not state.limits_sessions or _capacity(state, event.engine) is None:
        return
    pool, count = state.fleet.session_kv.of(event.engine), event.preemptions
    # What an engine queues is not in its pool yet.
    if not event.queued and (held := state.in_flight.held_on[event.engine]):
        pool.unique += _NEW * (min(1.0, event.used / held) - pool.unique)
    if count is not None:
        preempted = pool.preemptions is not None and count > pool.preemptions
        pool.share = share_after(pool.share, preempted=preempted)
        pool.preemptions = count


def end_session_turn(state: SchedulerState, request: RequestRecord) -> None:
    """Note that the engine of an ended turn keeps the KV of its context."""
    capacity, rollout = _capacity(state, request.engine), request.rollout
    if capacity is None:
        return
    kv = state.fleet.session_kv
    kv.note_turn(request.generated, rollout.log.path_tokens / rollout.turns)
    room = capacity - filled(state.in_flight, state.fleet, state.now, request.engine)
    kv.of(request.engine).keep(rollout.rollout_id, rollout.computed_tokens, room=room)


def start_session_turn(state: SchedulerState, request: RequestRecord) -> None:
    """Note that a turn is sent, so its KV is that of a running request."""
    kv, rollout = state.fleet.session_kv, request.rollout
    if rollout.engine in kv.pools:
        kv.pools[rollout.engine].drop(rollout.rollout_id)
    training = rollout.group.evaluation_id is None
    if training and isinstance(state.config.dispatch.max_sessions, int):
        kv.started.add(rollout.rollout_id)


def admits(state: SchedulerState, request: RequestRecord, engine: str) -> bool:
    """Return whether a turn without KV may start on an engine."""
    kv, limit = state.fleet.session_kv, state.config.dispatch.max_sessions
    if isinstance(limit, int):
        if len(kv.started) >= limit:
            kv.started = {each for each in kv.started if _lives(state, each) is not None}
        return len(kv.started) < limit
    capacity = _capacity(state, engine)
    if capacity is None:
        return True
    pool, report = kv.of(engine), report_of(state.fleet, state.now, engine)
    _evict(state, pool, capacity / state.config.prices.prefill_tokens_per_s)
    running = state.in_flight.open[engine]
    used = filled(state.in_flight, state.fleet, state.now, engine) + pool.tokens * pool.unique
    ahead = TURNS_AHEAD * kv.growth * (running + len(pool.contexts) + 1)
    full = report is not None and report.queued > 0
    return may_start(
        context=request.rollout.computed_tokens * pool.unique,
        room=-1.0 if full else pool.share * capacity - used - ahead,
        running=running,
        turn_tokens=kv.turn_tokens,
        prices=state.config.prices,
    )


def forget_sessions(state: SchedulerState, engine: str) -> None:
    """Note that an engine has no KV that turns may use any longer."""
    pool, queue = state.fleet.session_kv.of(engine), state.in_flight.queue
    for rollout_id in list(pool.contexts):
        pool.drop(rollout_id)
        rollout = state.in_flight.rollouts.get(rollout_id)
        request = None if rollout is None else rollout.request
        if request is not None and request.request_id in queue:
            queue.add(request)


def _capacity(state: SchedulerState, engine: str) -> int | None:
    """Return the size of an engine's pool in tokens; None if sessions need no room there."""
    control = state.fleet.control.engines.get(engine)
    if control is None or not control.able.caches_contexts:
        return None
    return control.able.kv_tokens


def _evict(state: SchedulerState, pool: SessionPool, seconds: float) -> None:
    """Drop the sessions that have ended, or are at their tools for more than `seconds`.

    The engine evicts in the order of the last use, so those behind a session that stays, stay too.
    """
    while pool.contexts:
        first = next(iter(pool.contexts))
        rollout = _lives(state, first)
        since = None if rollout is None else rollout.answered_at
        if rollout is not None and (since is None or state.now - since <= seconds):
            return
        pool.drop(first)


def _lives(state: SchedulerState, rollout_id: int) -> RolloutRecord | None:
    """Return a rollout that may still generate, or None."""
    rollout = state.in_flight.rollouts.get(rollout_id)
    if rollout is None or not rollout.eligible or rollout.state not in GENERATING:
        return None
    return rollout
