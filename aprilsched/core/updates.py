"""The in-flight refit: from the trainer's new version to the engines' own word that they have it.

An engine that does not say the new version afterwards is quarantined; if none has it and all
still have the old one, generation goes on under the old one and the trainer is told why.
"""

from __future__ import annotations

from aprilsched.core.commands import FinishUpdate
from aprilsched.core.control import Mode
from aprilsched.core.dropping import drop
from aprilsched.core.engines import lose
from aprilsched.core.events import Refitted, UpdateRequested
from aprilsched.core.ledger import Reason
from aprilsched.core.state import SchedulerState
from aprilsched.core.update import Update
from aprilsched.errors import InvariantViolation

__all__ = ["advance", "on_refitted", "on_update_requested"]


def on_update_requested(state: SchedulerState, event: UpdateRequested) -> None:
    if state.update is not None or event.version <= state.tracker.trainer:
        raise InvariantViolation(
            f"update to version {event.version} at version {state.tracker.trainer}, "
            f"with {state.update} under way"
        )
    state.update = Update(version=event.version)


def on_refitted(state: SchedulerState, event: Refitted) -> None:
    if state.update is not None and state.control.confirm(event.engine, Mode.PAUSED) is not None:
        state.update.answers[event.engine] = (event.version, event.cause)


def advance(state: SchedulerState) -> None:
    """Take the update to its next phase, if there is one and it is time."""
    update = state.update
    if update is None:
        return
    if not state.control.engines:
        _finish(state, update, cause="every engine is lost")
    elif update.answered:
        _settle(state, update)
    elif not update.quiet:
        # An evaluation is of one version, so it ends first; so do stragglers that run on.
        inside = state.rules.straggler in ("retract", "in_place")
        update.quiet = not state.evaluations and (inside or not state.book.open_attempts)


def _settle(state: SchedulerState, update: Update) -> None:
    took = update.took() & state.control.engines.keys()
    failed = update.failed()
    old = state.tracker.trainer
    if not took and all(update.answers[e][0] == old for e in state.control.engines):
        _finish(state, update, cause="; ".join(f"{engine}: {why}" for engine, why in failed))
        return
    for engine, why in failed:
        lose(state, engine, f"refit to version {update.version} failed: {why}")
    if not took:
        _finish(state, update, cause="no engine has the new version, nor the one before it")
        return
    for engine in took:
        state.tracker.refitted(engine, update.version)
        for request in state.book.open_requests(engine):
            request.crossed = True
    state.tracker.publish(update.version)
    state.delivered_since_update = 0
    state.book.counters.updates += 1
    _finish(state, update, failed=failed)
    _evict(state)


def _finish(
    state: SchedulerState,
    update: Update,
    *,
    cause: str = "",
    failed: tuple[tuple[str, str], ...] = (),
) -> None:
    state.update = None
    state.commands.append(FinishUpdate(version=update.version, failed=failed, cause=cause))


def _evict(state: SchedulerState) -> None:
    gate, version = state.rules.staleness, state.tracker.trainer
    for group in list(state.book.training_groups()):
        if gate.evicts(group.oldest_version, version):
            cause = f"older than {gate.bound} versions at version {version}"
            drop(state, group, Reason.STALE, cause)
