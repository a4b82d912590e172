"""Queries engines that may have restarted unnoticed for their version, before they get a request.

A restarted server serves the weights that it was first started with, without any sign of the
restart. So an engine is unverified once it was idle for a while, or once a connection to it broke.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.state.engine_control import EngineControl, Mode
from aprilsched.kernel.core.state.records import RequestRecord
from aprilsched.kernel.core.state.state import Fleet, SchedulerState
from aprilsched.kernel.core.state.weights import UpdateKind, Weights

TRUSTED_IDLE_S = 1.0
"""Seconds without requests after which an engine is unverified. No server restarts in less time."""


def verify(state: SchedulerState, *, full: Set[str]) -> set[str]:
    """Query the unverified engines that requests need; return all unverified engines.

    Args:
        full: names of the engines that get no requests now, which are not queried.
    """
    unverified = [control for control in _unverified(state) if control.name not in full]
    if not unverified:
        return set()
    for control in _needed(state, unverified, full):
        if state.fleet.verifying_since is None:
            state.fleet.verifying_since = state.now
        state.fleet.control.enter(control, Mode.VERIFYING)
        state.out.commands.append(do.Verify(engine=control.name, generates=control.suspect))
    state.fleet.index.refresh()
    return {control.name for control in unverified}


def awaits_answers(fleet: Fleet, weights: Weights, rolling: bool) -> bool:
    """Return whether nothing is sent before some engine has replied."""
    modes = {kind.mode for kind in fleet.index.kinds if not kind.leaves}
    update = weights.update
    if rolling and (update is None or update.kind is UpdateKind.ROLLING):
        # An engine that resumes alone after its refit delays no other engine.
        return Mode.VERIFYING in modes
    # Otherwise the first engine that continues after a pause would get the whole wave, or, if it
    # took only its share, all carried requests, which have the longest contexts.
    return bool(modes - {Mode.RUNNING})


def _unverified(state: SchedulerState) -> list[EngineControl]:
    """Return the engines that take requests and may have restarted unnoticed."""
    index = state.fleet.index
    # An engine that has replied since the first query is not queried again. The replies of a large
    # fleet take longer than the trusted time, so otherwise it would be queried forever, and nothing
    # would be sent.
    since = math.inf if state.fleet.verifying_since is None else state.fleet.verifying_since
    found = [
        control
        for kind, controls in index.kinds.items()
        if kind.idle and kind.mode is Mode.RUNNING and not kind.leaves
        for control in controls.values()
        if control.broken_connection
        or (
            state.now - control.version_seen_at > TRUSTED_IDLE_S and control.version_seen_at < since
        )
    ]
    found += [
        control
        for control in index.disconnected.values()
        if control.broken_connection
        and control.mode is Mode.RUNNING
        and state.in_flight.open[control.name]
        and not control.catching_up
    ]
    return index.in_order(found)


def _needed(
    state: SchedulerState, unverified: Sequence[EngineControl], full: Set[str]
) -> list[EngineControl]:
    """Return the unverified engines that waiting requests need.

    In a large fleet some engines are always idle. Querying all of them would take more time than
    all tokens, and would delay every request until the slowest has replied.
    """
    queue, trainer = state.in_flight.queue, state.weights.versions.trainer
    if len(queue) >= len(unverified):
        return list(unverified)
    needed: list[EngineControl] = []
    idle: dict[int, set[str]] = {}
    for kind, controls in state.fleet.index.kinds.items():
        if kind.idle and not kind.leaves:
            idle.setdefault(kind.version, set()).update(controls.keys() - full)
    versions = state.weights.versions.engines
    # With rolling refits an engine takes only requests of its version. If it counted as ready for
    # other requests, it would keep them waiting forever.
    for version in sorted({versions[control.name] for control in unverified}):
        own = (version, None) if version == trainer else (version,)
        waiting = [
            request for request in queue if not state.rolling or queue.version_of(request) in own
        ]
        of_version = [control for control in unverified if versions[control.name] == version]
        needed += _needed_of_version(state, waiting, of_version, idle.get(version, set()))
    return needed


def _needed_of_version(
    state: SchedulerState,
    waiting: Sequence[RequestRecord],
    unverified: Sequence[EngineControl],
    idle: Set[str],
) -> list[EngineControl]:
    preferred, avoid = set[str](), set[str]()
    for request in waiting:
        avoid.update(request.avoid)
        if state.placement == "prefix":
            preferred.add(state.in_flight.context_engine(request.rollout))
    ready = len(idle - {control.name for control in unverified} - avoid)
    first, others = list[EngineControl](), list[EngineControl]()
    for control in unverified:
        asked = control.broken_connection or control.name in preferred
        (first if asked else others).append(control)
    others.sort(key=lambda control: control.name in avoid)
    return first + others[: max(0, len(waiting) - ready - len(first))]
