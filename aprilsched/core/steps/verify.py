"""What shows that an engine has not the version that it should have, and what follows from it.

A server that is restarted comes back with the weights that it was first started with, and somebody
else may load weights behind the scheduler's back. Four things show it:

- what the engine says when it is asked: before the first request after a quiet time, and after a
  connection to it broke;
- that another process answers then, which the shell reports as a failed call;
- the label on the tokens that it streams;
- the spans at a response's end.

The engine then stands by until it was brought to the fleet's version, and its requests go on
elsewhere with the tokens known so far. The tokens in question are booked under the version that the
engine names. An evaluation is of one version, so a group of it that has such tokens goes to the
ledger and its prompt is generated again.
"""

from __future__ import annotations

from aprilsched.core.messages.events import Verified
from aprilsched.core.state.engine_control import Mode
from aprilsched.core.state.ledger import Reason
from aprilsched.core.state.records import RequestRecord
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.drop import drop
from aprilsched.core.steps.engines import demote
from aprilsched.core.steps.launch import launch_again
from aprilsched.types import VersionSpan

__all__ = ["disown", "foreign_label", "foreign_span", "on_verified"]


def on_verified(state: SchedulerState, event: Verified) -> None:
    control = state.fleet.control.confirm(event.engine, Mode.VERIFYING, Mode.RUNNING)
    if control is None:
        return
    if event.version == state.weights.base:
        control.doubt, control.version_seen_at = "", state.now
        return
    has = "inconsistent weights" if event.version is None else f"version {event.version}"
    cause = f"it says that it has {has} {_wanted(state)}"
    _stand_by(state, event.engine, event.version, cause)


def foreign_label(state: SchedulerState, request: RequestRecord, label: int | None) -> int | None:
    """The label, if it is of a version that the open attempt cannot be sampled under."""
    oldest, newest = _possible(state, request)
    return label if label is not None and not oldest <= label <= newest else None


def foreign_span(
    state: SchedulerState, request: RequestRecord, spans: tuple[VersionSpan, ...] | None
) -> int | None:
    """The first version in `spans` that the attempt cannot have been sampled under."""
    oldest, newest = _possible(state, request)
    for span in spans or ():
        if not oldest <= span.version <= newest:
            return span.version
    return None


def disown(state: SchedulerState, request: RequestRecord, version: int) -> None:
    """An attempt of `request` has tokens of a `version` that its engine should not have.

    The attempt may be open still, or be closed in the event in work.
    """
    engine, group = request.engine, request.rollout.group
    cause = f"it has sampled under version {version} {_wanted(state)}"
    _stand_by(state, engine, version, cause)
    # After its engine has left: nothing is called back from there any more.
    if group.evaluation_id is not None and group.dropped is None:
        cause = f"{engine} had version {version}, which is not that of the evaluation"
        drop(state, group, Reason.OTHER_VERSION, cause)
        launch_again(state, group)


def _possible(state: SchedulerState, request: RequestRecord) -> tuple[int, int]:
    """The oldest and the newest label that an engine may have shown since the attempt was sent."""
    if request.adapter is not None:
        # A label is of the base model, which stays the same under its adapters.
        return state.weights.base, state.weights.base
    update, newest = state.weights.update, state.weights.versions.trainer
    if update is not None and not update.beside:
        newest = max(newest, update.version)
    return request.sent_version, newest


def _wanted(state: SchedulerState) -> str:
    return (
        f"where the fleet has {state.weights.base}, so it was restarted, or somebody else has "
        "changed its weights"
    )


def _stand_by(state: SchedulerState, engine: str, version: int | None, cause: str) -> None:
    control = state.fleet.control.engines.get(engine)
    refitting = state.weights.update is not None and engine in state.weights.update.refitting
    # What an engine has after a refit that is under way, it says itself at its end.
    if control is None or refitting:
        return
    control.inconsistent = version is None
    if version is not None:
        # No adapter of the fleet's base model belongs to it any more.
        control.base = version
    demote(state, engine, cause)
