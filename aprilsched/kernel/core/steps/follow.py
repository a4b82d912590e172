"""Follows versions that another client loads without notice to the scheduler (``follow_weights``).

A version newer than the trainer's shows in three places: in an engine's reply when it is queried or
watched, in the label on its tokens, and in the spans of a response. The first engine that shows one
starts an update of a separate kind: nothing is paused, and every engine is queried until it has the
version or a minute has passed. Two rules keep one engine from misleading the fleet:

- At least half of the engines must have moved. Otherwise those that have moved enter standby, and
  the others continue unchanged.
- An older version is never followed, because it comes from a restarted server.

An engine that moves later comes into use when it shows the fleet's version. A pause by another
client does not count as silence of the engine, for as long as an update may take.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.state.engine_control import EngineControl, Mode
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.state.weights import Update, UpdateKind
from aprilsched.kernel.core.steps.engines import promote
from aprilsched.kernel.core.steps.refit import start_update


def follow(state: SchedulerState, engine: str, version: int | None) -> bool:
    """Note that `engine` has shown `version`; return whether the fleet follows it now."""
    control, update = state.fleet.control.of(engine), state.weights.update
    newer = version is not None and version > state.weights.versions.trainer
    if control is None or version is None or not (newer and state.config.follow_weights):
        return False
    if update is not None:
        return update.kind is UpdateKind.FOLLOWED
    alone = version == control.not_followed
    if alone or state.fleet.sleep is not None or state.weights.adapter is not None:
        return False
    start_update(state, Update(version=version, kind=UpdateKind.FOLLOWED))
    return True


def on_version_seen(state: SchedulerState, event: ev.VersionSeen) -> None:
    control = state.fleet.control.of(event.engine)
    if control is None:
        return
    _note_pause(state, control, event)
    if event.version == state.weights.versions.trainer:
        _join_in(state, control)
    else:
        follow(state, event.engine, event.version)


def _note_pause(state: SchedulerState, control: EngineControl, event: ev.VersionSeen) -> None:
    """Note whether another client has paused an engine that should run."""
    if event.paused is None:
        return
    state.note_work(control.name)
    if not event.paused or control.mode is not Mode.RUNNING:
        control.paused_elsewhere = None
    elif control.paused_elsewhere is None:
        control.paused_elsewhere = state.now


def _join_in(state: SchedulerState, control: EngineControl) -> None:
    """Put a standby engine into use that has moved to the fleet's version."""
    free = control.name in state.fleet.control.standby and not control.catching_up
    full = state.weights.adapter is None and not control.inconsistent
    if free and full and state.weights.update is None and state.fleet.sleep is None:
        promote(state, control.name)
