"""Handles outages, in which no engine is in use: what to wait for, and what to report.

Nothing in flight is lost in an outage. Requests wait with the tokens known so far, and an update
waits for an engine that can take it. The run continues once an engine returns with the fleet's
version. Otherwise the outage ends in one of two ways:

- No engine returns within ``health.fleet_wait_s``: the fleet is given up.
- Engines return without the fleet's weights, and these weights cannot be published again: calls
  that wait for tokens end with an error whose remedy is to publish a version, and the scheduler
  continues after that.

An evaluation has one version. If its engines are gone and only an update can continue the run, the
evaluation is abandoned. Otherwise the evaluation and the update would wait for each other.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.state import Fleet, Outage, SchedulerState
from aprilsched.kernel.core.state.weights import UpdatePhase
from aprilsched.kernel.core.steps.drop import drop

_SAY_AGAIN_S = 60.0
"""Seconds after which the caller is reminded that the scheduler waits for the fleet."""
_REJOIN_S = 10.0
"""Seconds after the loss or return of an engine in which another may return with the version."""
_KEPT = 8
"""Number of recent causes to keep; a fleet may have hundreds of engines."""


def note_loss(fleet: Fleet, now: float, engine: str, cause: str) -> None:
    """Note that an engine is lost."""
    fleet.rejoin_expected_until = now + _REJOIN_S
    fleet.lost.pop(engine, None)
    fleet.lost[engine] = cause
    if len(fleet.lost) > _KEPT:
        del fleet.lost[next(iter(fleet.lost))]


def note_join(fleet: Fleet, now: float, engine: str) -> None:
    """Note that an engine has joined or is back."""
    fleet.rejoin_expected_until = now + _REJOIN_S
    fleet.lost.pop(engine, None)


def stranded(state: SchedulerState) -> bool:
    """Return whether nothing can be generated before the trainer publishes a version."""
    return state.weights.update is None and state.fleet.sleep is None and _needs_update(state)


def attend(state: SchedulerState) -> None:
    """Detect the start and the end of an outage, and report it while it lasts."""
    if state.fleet.control.engines:
        state.fleet.outage = None
        return
    if state.fleet.outage is None:
        state.fleet.outage = Outage()
    if not state.fleet.control.standby:
        _await(state, state.fleet.outage)
    elif _needs_update(state):
        _want_update(state)


def _needs_update(state: SchedulerState) -> bool:
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
    lost, waited = tuple(state.fleet.lost.items()), now - outage.since
    left = outage.since + state.config.health.fleet_wait_s - now
    if left <= 0:
        outage.given_up = True
        state.out.announce(facts.FleetGivenUp(lost=lost, waited_s=waited))
    elif outage.said_at is None or now - outage.said_at >= _SAY_AGAIN_S:
        outage.said_at = now
        state.out.announce(facts.FleetAwaited(lost=lost, waited_s=waited, left_s=left))


def _want_update(state: SchedulerState) -> None:
    batch = state.delivery.takes_parts and state.delivery.collecting and stranded(state)
    update = state.weights.update
    started = update is not None and update.phase is not UpdatePhase.WAITING
    abandoned = () if started else tuple(state.evaluations.running)
    if not (batch or abandoned):
        return
    engines = tuple(state.fleet.control.standby)
    for evaluation_id in abandoned:
        cause = f"{', '.join(engines)} came back without the version that it was of"
        for group in state.evaluations.running.pop(evaluation_id):
            if group.dropped is None:
                drop(state, group, Reason.ABANDONED, cause)
    if batch:
        state.delivery.demand = "left"
    state.out.announce(
        facts.UpdateWanted(
            engines=engines,
            version=state.weights.versions.trainer,
            batch=batch,
            evaluations=abandoned,
            base=state.weights.adapters_base,
        )
    )
