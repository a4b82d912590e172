"""Engines that join, confirm control calls, and get lost."""

from __future__ import annotations

from aprilsched.core.commands import LoseEngine
from aprilsched.core.control import Mode
from aprilsched.core.events import (
    Continued,
    ControlFailed,
    EngineLost,
    Flushed,
    Opened,
    Paused,
)
from aprilsched.core.lifecycle import Move, State
from aprilsched.core.state import SchedulerState
from aprilsched.core.turns import take_back

__all__ = [
    "lose",
    "on_continued",
    "on_control_failed",
    "on_engine_lost",
    "on_flushed",
    "on_opened",
    "on_paused",
]


def on_opened(state: SchedulerState, event: Opened) -> None:
    for engine in event.engines:
        state.tracker.join(engine.name, engine.version)
        state.control.join(engine.name)


def on_paused(state: SchedulerState, event: Paused) -> None:
    if state.control.confirm(event.engine, Mode.PAUSED) is not None:
        _move_open(state, event.engine, State.RUNNING, Move.HOLD)


def on_flushed(state: SchedulerState, event: Flushed) -> None:
    control = state.control.confirm(event.engine, Mode.PAUSED)
    if control is not None:
        control.flushed = True


def on_continued(state: SchedulerState, event: Continued) -> None:
    control = state.control.confirm(event.engine, Mode.RUNNING)
    if control is None:
        return
    _move_open(state, event.engine, State.HELD, Move.CONTINUE)
    if control.flushed:
        for request in state.book.open_requests(event.engine):
            rollout = request.rollout
            request.prefill_due = len(rollout.prompt_ids) + len(rollout.log)


def on_control_failed(state: SchedulerState, event: ControlFailed) -> None:
    lose(state, event.engine, f"{event.call} failed: {event.cause}")


def on_engine_lost(state: SchedulerState, event: EngineLost) -> None:
    lose(state, event.engine, event.cause)


def lose(state: SchedulerState, engine: str, cause: str) -> None:
    """Quarantine an engine; its requests go on elsewhere with all tokens known."""
    if state.control.engines.pop(engine, None) is None:
        return
    state.tracker.leave(engine)
    for request in state.book.open_requests(engine):
        state.book.close_attempt(request, None)
        request.avoid = engine
        take_back(state, request)
    if state.update is not None:
        state.update.answers.setdefault(engine, (state.tracker.trainer, cause))
    state.commands.append(LoseEngine(engine=engine, cause=cause, last=not state.control.engines))


def _move_open(state: SchedulerState, engine: str, where: State, move: Move) -> None:
    for request in state.book.open_requests(engine):
        if request.rollout.state is where:
            request.rollout.move(move)
