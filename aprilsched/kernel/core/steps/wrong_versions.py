"""Finds engines that have another version than they should, and puts them on standby.

A restarted server serves the weights that it was first started with. Another client may also load
weights without the scheduler. Four things show a wrong version:

- the engine's reply to a version query, which is sent before the first request after a time without
  requests, and after a connection to the engine broke;
- a reply to this query by another process, which the shell reports as a failed call;
- the label on the tokens that the engine streams;
- the spans at the end of a response.

With ``follow_weights`` the fleet follows a newer version
(:mod:`aprilsched.kernel.core.steps.follow`). Otherwise the engine is on standby until it gets the
fleet's version, and its requests continue elsewhere with the tokens known so far. The tokens in
question get the version that the engine reports. An evaluation has one version, so its group with
such tokens is dropped, and the prompt is generated again.
"""

from __future__ import annotations

from collections.abc import Iterable

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.state.engine_control import EngineControl, Mode
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import RequestRecord
from aprilsched.kernel.core.state.state import Fleet, SchedulerState
from aprilsched.kernel.core.state.weights import UpdateKind, Weights
from aprilsched.kernel.core.steps.drop import drop
from aprilsched.kernel.core.steps.engines import demote
from aprilsched.kernel.core.steps.follow import follow
from aprilsched.kernel.core.steps.launch import launch_again


def on_verified(state: SchedulerState, event: ev.Verified) -> None:
    control = state.fleet.control.confirm(event.engine, Mode.VERIFYING, Mode.RUNNING)
    if control is None:
        return
    update = state.weights.update
    awaited = update is not None and update.external and event.version == update.version
    if event.version == _expected(state.weights, state.rolling, control) or awaited:
        control.broken_connection, control.version_seen_at = "", state.now
        if control.suspect:
            # It has just generated tokens, so the requests that failed on it were at fault.
            control.suspect, control.consecutive_failures = False, 0
        return
    has = "inconsistent weights" if event.version is None else f"version {event.version}"
    wanted = _wanted(state.fleet, state.weights, state.rolling, event.engine)
    cause = f"it reports {has} {wanted}"
    _stand_by_or_follow(state, event.engine, event.version, cause)


def _stand_by_or_follow(
    state: SchedulerState, engine: str, version: int | None, cause: str
) -> bool:
    """Put the engine on standby unless the fleet follows it; return whether the fleet does."""
    followed = follow(state, engine, version)
    if not followed:
        _stand_by(state, engine, version, cause)
    return followed


def foreign_version(
    weights: Weights, rolling: bool, request: RequestRecord, versions: Iterable[int]
) -> int | None:
    """Return the first version that the attempt cannot have been sampled under, or None."""
    oldest, newest = _possible(weights, rolling, request)
    for version in versions:
        if not oldest <= version <= newest:
            return version
    return None


def disown(state: SchedulerState, request: RequestRecord, version: int) -> None:
    """Follow an engine that sampled under a wrong `version`, or put it on standby.

    The attempt of `request` is still open, or was closed in this event.
    """
    engine, group = request.engine, request.rollout.group
    wanted = _wanted(state.fleet, state.weights, state.rolling, engine)
    cause = f"it has sampled under version {version} {wanted}"
    if _stand_by_or_follow(state, engine, version, cause):
        return  # An evaluation is generated again when the fleet has the version.
    # The engine must be out of use first, so that nothing is aborted on it.
    if group.evaluation_id is not None and group.dropped is None:
        cause = f"{engine} had version {version}, which is not that of the evaluation"
        drop(state, group, Reason.OTHER_VERSION, cause)
        launch_again(state, group)


def _possible(weights: Weights, rolling: bool, request: RequestRecord) -> tuple[int, int]:
    """Return the oldest and newest version that the engine may have reported since dispatch."""
    if request.adapter is not None:
        # A label is the version of the full model, which stays the same under its adapters.
        return weights.base, weights.base
    update, newest = weights.update, weights.versions.trainer
    if rolling and (update is None or update.kind is UpdateKind.ROLLING):
        # An engine is refitted only when it has no requests.
        return request.sent_version, request.sent_version
    # An update that waits, for an evaluation to end for example, has loaded nothing yet. Another
    # client may have loaded weights under the same number.
    loads = update is not None and (update.external or request.engine in update.refitting)
    if update is not None and loads and update.kind is not UpdateKind.ADAPTER:
        newest = max(newest, update.version)
    return request.sent_version, newest


def _expected(weights: Weights, rolling: bool, control: EngineControl) -> int:
    """Return the version of the full model that the engine should have."""
    if not rolling:
        return weights.base
    return weights.versions.engines.get(control.name, weights.base)


def _wanted(fleet: Fleet, weights: Weights, rolling: bool, engine: str) -> str:
    control = fleet.control.of(engine)
    expected = weights.base if control is None else _expected(weights, rolling, control)
    return (
        f"where the fleet has {expected}, so it was restarted, or another client has changed its "
        "weights"
    )


def _stand_by(state: SchedulerState, engine: str, version: int | None, cause: str) -> None:
    control = state.fleet.control.engines.get(engine)
    refitting = state.weights.update is not None and engine in state.weights.update.refitting
    # An engine that is being refitted reports its version at the end of the refit.
    if control is None or refitting:
        return
    control.inconsistent = version is None
    if version is not None:
        # The fleet's adapters do not belong to this model.
        control.base = version
    demote(state, engine, cause)
