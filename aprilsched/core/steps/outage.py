"""A fleet without an engine in use: what is waited for, how long, and what the trainer is told.

Nothing that is in flight is lost in an outage: requests wait with the tokens known so far, an
update waits for an engine that can take it, and once one is back with the fleet's version all goes
on as if nothing had been. Otherwise it ends in one of two ways:

- none is there at all for ``fleet_wait_s``: the fleet is given up;
- some are back, without the fleet's weights and without a way to them: whoever waits for tokens is
  told to publish a version, and the scheduler works on after that.

An evaluation is of one version. Where its engines have gone and an update is the only way on, it
is abandoned: the update would wait for it, and it for the update.
"""

from __future__ import annotations

from aprilsched.core.messages.commands import AwaitFleet, GiveUpFleet, WantUpdate
from aprilsched.core.messages.facts import FleetAwaited, FleetGivenUp, UpdateWanted
from aprilsched.core.state.ledger import Reason
from aprilsched.core.state.state import Outage, SchedulerState
from aprilsched.core.steps.drop import drop

__all__ = ["attend", "note_join", "note_loss", "stranded"]

_SAY_AGAIN_S = 60.0
_HOPE_S = 10.0
"""After an engine was lost, or came back without the version: another may come with it."""
_KEPT = 8
"""Causes that are kept, the latest; a fleet may have hundreds of engines."""


def note_loss(state: SchedulerState, engine: str, cause: str) -> None:
    """An engine is not there any more."""
    state.fleet.rejoin_expected_until = state.now + _HOPE_S
    state.fleet.lost.pop(engine, None)
    state.fleet.lost[engine] = cause
    if len(state.fleet.lost) > _KEPT:
        del state.fleet.lost[next(iter(state.fleet.lost))]


def note_join(state: SchedulerState, engine: str) -> None:
    """An engine is there again, or for the first time."""
    state.fleet.rejoin_expected_until = state.now + _HOPE_S
    state.fleet.lost.pop(engine, None)


def stranded(state: SchedulerState) -> bool:
    """Nothing can be generated, now or later, before the trainer publishes a version."""
    return state.weights.update is None and state.fleet.sleep is None and _hopeless(state)


def attend(state: SchedulerState) -> None:
    """Note the beginning and the end of an outage, and tell of it while it lasts."""
    if state.fleet.control.engines:
        state.fleet.outage = None
        return
    if state.fleet.outage is None:
        state.fleet.outage = Outage()
    if not state.fleet.control.standby:
        _await(state, state.fleet.outage)
    elif _hopeless(state):
        _want_update(state)


def _hopeless(state: SchedulerState) -> bool:
    control = state.fleet.control
    if control.engines or not control.standby or state.now < state.fleet.rejoin_expected_until:
        return False
    return not any(engine.catching_up for engine in control.standby.values())


def _await(state: SchedulerState, outage: Outage) -> None:
    if outage.given_up:
        return
    now = state.now
    if outage.since is None:
        outage.since = now
    lost, left = tuple(state.fleet.lost.items()), outage.since + state.config.fleet_wait_s - now
    if left <= 0:
        outage.given_up = True
        state.tell(FleetGivenUp(lost=lost, waited_s=now - outage.since))
        state.commands.append(GiveUpFleet(lost=lost, waited_s=now - outage.since))
    elif outage.said_at is None or now - outage.said_at >= _SAY_AGAIN_S:
        outage.said_at = now
        state.tell(FleetAwaited(lost=lost, waited_s=now - outage.since, left_s=left))
        state.commands.append(AwaitFleet(lost=lost, waited_s=now - outage.since, left_s=left))


def _want_update(state: SchedulerState) -> None:
    batch = state.collecting and stranded(state)
    begun = state.weights.update is not None and state.weights.update.may_pause
    abandoned = () if begun else tuple(state.evaluations.running)
    if not (batch or abandoned):
        return
    engines = tuple(state.fleet.control.standby)
    for evaluation_id in abandoned:
        cause = f"{', '.join(engines)} came back without the version that it was of"
        for group in state.evaluations.running.pop(evaluation_id):
            if group.dropped is None:
                drop(state, group, Reason.ABANDONED, cause)
    if batch:
        state.delivery.batch_requested = False
    state.tell(
        UpdateWanted(
            engines=engines,
            version=state.weights.versions.trainer,
            batch=batch,
            evaluations=abandoned,
        )
    )
    state.commands.append(
        WantUpdate(
            engines=engines,
            version=state.weights.versions.trainer,
            batch=batch,
            evaluations=abandoned,
        )
    )
