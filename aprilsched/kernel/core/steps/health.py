"""Finds silent and slow engines at each tick (:mod:`aprilsched.kernel.core.state.engine_health`).

Both are lost like an engine whose connection broke: their requests continue elsewhere with their
tokens, and the engine may rejoin later. An engine that cannot be compared with another one is never
lost for being slow, because slow progress is better than none.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.engine_control import EngineControl, Mode
from aprilsched.kernel.core.state.engine_health import (
    PREFILL_TOKENS_PER_S,
    SLOW_WINDOWS,
    EngineHealth,
    Window,
)
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.steps.engines import lose


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
    """Return whether another client has paused the engine, no longer than an update takes."""
    since = control.paused_elsewhere
    return since is not None and state.now - since < state.config.timeouts.refit_s


def _stalled(state: SchedulerState, engine: str, health: EngineHealth) -> bool:
    """Return whether the engine is silent for longer than it may be.

    It may be silent for the timeout plus the prefill of all requests that it has not answered yet.
    """
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
        return  # a silent engine has a separate timeout
    share, usual = state.config.health.slow_share, health.usual_at(window.octave)
    if window.fair is None or usual is None or window.fair >= share * usual:
        health.slow, health.reported = 0, False
        health.learn(window)
        return
    others = [name for name in state.fleet.control.engines if name != engine]
    median = state.fleet.health.median(others, state.now)
    if median is not None and window.fair >= share * median:
        # The whole fleet is slow, or under a new load.
        health.slow = 0
        health.learn(window)
        return
    cause = f"{window.fair:.3g} tokens/s a request, where {usual:.3g} are usual for it"
    if median is None:
        health.learn(window)
        if not health.reported:
            health.reported = True
            state.out.announce(facts.EngineSlow(engine=engine, cause=cause))
        return
    health.slow += 1
    if health.slow >= SLOW_WINDOWS:
        lose(state, engine, f"slow: {cause} and {median:.3g} for the others")
