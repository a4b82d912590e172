"""Lets the engines sleep: they release their memory for the trainer and take it back later.

Stragglers are handled first: if every engine can release memory while requests wait in a pause,
they stay inside it (retract). Otherwise they are aborted, return with their tokens and are sent
again later. Weights that were released and not kept by the server must be refitted before
generation: an engine that wakes without a refit enters standby.
"""

from __future__ import annotations

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.engine_control import KV_CACHE, WEIGHTS, Mode
from aprilsched.kernel.core.state.state import SchedulerState, Sleep
from aprilsched.kernel.core.steps.engines import demote
from aprilsched.kernel.core.steps.refit import end_following
from aprilsched.kernel.core.steps.replan import stay_synchronous
from aprilsched.kernel.core.steps.sessions import forget_sessions


def on_sleep_requested(state: SchedulerState, event: ev.SleepRequested) -> None:
    end_following(state, "the trainer requested the engines' memory")
    if state.fleet.sleep is not None or state.weights.update is not None:
        raise InvariantViolation("sleep was asked for during a sleep or an update")
    state.out.tell(facts.SleepRequested(tags=event.tags))
    holds = all(
        control.able.release_while_paused for control in state.fleet.control.engines.values()
    )
    inside = state.behaviour.waits_asleep and holds
    stay_synchronous(state)
    state.fleet.sleep = Sleep(tags=frozenset(event.tags), inside=inside)


def on_wake_requested(state: SchedulerState, _: ev.WakeRequested) -> None:
    if state.fleet.sleep is None:
        raise InvariantViolation("the engines were woken without a sleep")
    state.out.tell(facts.WakeRequested())
    state.fleet.sleep.waking = True


def on_released(state: SchedulerState, event: ev.Released) -> None:
    control = state.fleet.control.confirm(event.engine, Mode.RELEASING, Mode.PAUSED)
    if control is not None:
        control.released |= set(event.tags)
        if KV_CACHE in event.tags:
            forget_sessions(state, event.engine)
        control.inconsistent = control.inconsistent or (
            WEIGHTS in event.tags and not control.able.keeps_released_weights
        )


def on_woken(state: SchedulerState, event: ev.Woken) -> None:
    control = state.fleet.control.confirm(event.engine, Mode.WAKING, Mode.PAUSED)
    if control is not None:
        control.released -= set(event.tags)


def advance_sleep(state: SchedulerState) -> None:
    """Advance the sleep to its next phase, if its conditions are met."""
    sleep = state.fleet.sleep
    if sleep is None:
        return
    engines = state.fleet.control.engines.values()
    if not sleep.may_pause:
        ended = sleep.inside or not state.in_flight.open_attempts
        sleep.may_pause = ended and not state.evaluations.running
    if sleep.waking and state.weights.update is None:
        for control in [c for c in engines if c.inconsistent and not c.released]:
            demote(state, control.name, "its weights were released and not brought back")
        if not any(control.released for control in engines):
            state.fleet.sleep = None
            state.out.announce(facts.SleepEnded())
    elif sleep.may_pause and not sleep.asleep and all(sleep.tags <= c.released for c in engines):
        sleep.asleep = True
        state.out.announce(facts.SleepBegun())
