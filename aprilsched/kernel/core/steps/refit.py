"""Carries a refit from the trainer's new version to the last engine that reports it.

- An engine that does not report the new version enters standby, where the next refit reaches it.
  If no engine has the new version and all still have the old one, generation continues under the
  old version, and the trainer gets the reason.
- A full refit reaches paused engines only. An adapter is loaded into running engines. Requests sent
  under the old adapter finish under it, and then it is unloaded.
- An external version is loaded by another client, in a pause that the scheduler did not see.
  Nothing is paused for it. The engines report which version sampled each token of the affected
  requests. An affected evaluation is generated again, because an evaluation has one version.
- An engine on standby catches up alone, once for each version, if the fleet's version can be
  published again. Otherwise it waits for the trainer's next version.
- With rolling refits a new version becomes the trainer's at once, and engines in use catch up alone
  too, each once it has no rollouts of an older version
  (:mod:`aprilsched.kernel.core.steps.rolling`).
"""

from __future__ import annotations

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.engine_control import EngineControl, Mode
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import RequestRecord, State
from aprilsched.kernel.core.state.state import Fleet, Outbox, SchedulerState
from aprilsched.kernel.core.state.weights import Update, UpdateKind, UpdatePhase, Weights
from aprilsched.kernel.core.steps.batch import acknowledge, end_stream, withdraw_offer
from aprilsched.kernel.core.steps.drop import drop
from aprilsched.kernel.core.steps.engines import demote, promote
from aprilsched.kernel.core.steps.launch import begin_again, launch_again
from aprilsched.kernel.core.steps.members import restart_member
from aprilsched.kernel.core.steps.samples import split
from aprilsched.kernel.core.steps.sessions import forget_sessions


def on_update_requested(state: SchedulerState, event: ev.UpdateRequested) -> None:
    # A request by the trainer takes precedence, even for the same version.
    end_following(state, f"version {event.version} was requested")
    # If no engine has the fleet's version, as after a restart, it may be published once more.
    again = event.version == state.weights.versions.trainer and not state.fleet.control.engines
    if state.weights.update is not None or (
        event.version <= state.weights.versions.trainer and not again
    ):
        raise InvariantViolation(
            f"update to version {event.version} at version {state.weights.versions.trainer}, "
            f"with {state.weights.update} under way"
        )
    start_update(
        state,
        Update(
            version=event.version,
            kind=_kind_of(state.fleet, state.rolling, event),
            labelled=event.labelled,
            republishable=event.republishable,
            acknowledges=event.acknowledges,
        ),
    )


def _kind_of(fleet: Fleet, rolling: bool, event: ev.UpdateRequested) -> UpdateKind:
    """Return how the version reaches the engines."""
    if event.external:
        return UpdateKind.EXTERNAL
    if event.adapter:
        return UpdateKind.ADAPTER
    # Sleeping engines take the version together, because nothing runs in them.
    if rolling and event.republishable and fleet.sleep is None:
        return UpdateKind.ROLLING
    return UpdateKind.PAUSING


def on_parts_follow(state: SchedulerState, _: ev.PartsFollow) -> None:
    """Record for the store that parts follow; only a later process needs to know."""
    state.weights.in_parts = True


def end_following(state: SchedulerState, cause: str) -> None:
    """Cancel an update that the trainer has not requested, if there is one.

    Engines that have its version will show it again.
    """
    update = state.weights.update
    if update is not None and update.kind is UpdateKind.FOLLOWED:
        state.weights.update = None
        state.out.tell(facts.UpdateFinished(version=update.version, cause=cause))


def start_update(state: SchedulerState, update: Update) -> None:
    """Start an update; none may be under way."""
    end_stream(state)
    state.out.tell(
        facts.UpdateBegun(
            version=update.version,
            adapter=update.kind is UpdateKind.ADAPTER,
            external=update.external,
        )
    )
    withdraw_offer(state)
    state.weights.update = update
    if update.phase is UpdatePhase.PREPARING:
        _stop_catching_up(state.fleet, state.weights)
    if update.external:
        # A response that ends before the engines have answered may have tokens of both versions.
        for request in state.in_flight.open_requests():
            if not request.crossed:
                update.met.add(request.request_id)
            _cross(state.in_flight, request, update)


def on_update_withdrawn(state: SchedulerState, event: ev.UpdateWithdrawn) -> None:
    """End an update that the trainer gave up, unless its weights are already being loaded."""
    update = state.weights.update
    if (
        update is not None
        and update.version == event.version
        and update.phase is not UpdatePhase.LOADING
    ):
        state.out.tell(facts.UpdateWithdrawn(version=event.version))
        cause = "the call was cancelled before any weights were loaded"
        _finish(state, update, cause=cause)


def on_refitted(state: SchedulerState, event: ev.Refitted) -> None:
    control, update = state.fleet.control.of(event.engine), state.weights.update
    if control is None or control.catching_up != event.catch_up:
        return
    if not event.catch_up and not _asked(update, event):
        return
    state.out.tell(
        facts.EngineRefitted(
            engine=event.engine,
            version=event.version,
            cause=event.cause,
            catch_up=event.catch_up,
        )
    )
    if state.cached_kv == "apart":
        forget_sessions(state, event.engine)
    if control.mode is Mode.REFITTING:
        state.fleet.control.enter(control, Mode.PAUSED)
        state.fleet.control.touch(control.name)
    if event.catch_up:
        _note_consistency(control, event, control.loading)
        _caught_up(state, event)
    elif update is not None:
        _note_consistency(control, event, update.version)
        version = None if control.inconsistent else event.version
        update.answers[event.engine] = (version, event.cause)


def _asked(update: Update | None, event: ev.Refitted) -> bool:
    """Return whether the update waits for this reply.

    The reply of an engine that was lost and has returned is to an earlier call, and does not count.
    Neither does a reply about a followed version once the trainer has requested another one.
    """
    return (
        update is not None
        and (update.kind is UpdateKind.FOLLOWED) == event.followed
        and event.engine in update.refitting
        and event.engine not in update.answers
    )


def _note_consistency(control: EngineControl, event: ev.Refitted, wanted: int) -> None:
    """Note whether the engine's weights are inconsistent.

    Only the wanted version, loaded without an error, makes them consistent again.
    """
    took = event.version == wanted and not event.cause
    control.inconsistent = not took and (control.inconsistent or event.version is None)


def advance(state: SchedulerState) -> None:
    """Advance the update to its next phase, if its conditions are met."""
    update = state.weights.update
    if update is None:
        return
    if update.answered:
        _conclude(state, update)
    elif update.kind is UpdateKind.ROLLING:
        # An evaluation has one version, so it ends first.
        if not state.evaluations.running:
            _roll_over(state, update)
    elif update.phase is UpdatePhase.WAITING:
        # An evaluation has one version, so it ends first. So do requests that cannot wait inside a
        # paused engine, or whose adapter would be on another model.
        inside = update.kind is UpdateKind.ADAPTER or (
            state.behaviour.waits_inside and not state.weights.leaves_adapters
        )
        if not state.evaluations.running and (inside or not state.in_flight.open_attempts):
            update.enter(UpdatePhase.PREPARING)
            _stop_catching_up(state.fleet, state.weights)


def _stop_catching_up(fleet: Fleet, weights: Weights) -> None:
    """Release the standby engines that are not being refitted to the update.

    The version that they were about to load will soon be out of date. While the update waits for an
    evaluation, this would be too early: other engines may start to catch up then, and would keep
    the update waiting forever once its other engines are lost.
    """
    if weights.adapter is not None:
        return
    for control in fleet.control.standby.values():
        if control.catching_up and control.mode is not Mode.REFITTING:
            control.catching_up = False
            fleet.control.touch(control.name)


def refit(state: SchedulerState) -> None:
    """Load the new version once all engines that should get it are ready."""
    update = state.weights.update
    if update is None or update.phase is not UpdatePhase.PREPARING:
        return
    if not update.not_ready.none(state.fleet.control.all, lambda c: _is_ready(state, update, c)):
        return
    there = list(state.fleet.control.all())
    targets = [control for control in there if not control.catching_up]
    if update.kind is UpdateKind.ADAPTER:
        targets = [control for control in targets if _has_base(state.weights, control)]
    if not targets:
        # The update waits while it has no engine, or while one is catching up.
        if there and not any(control.catching_up for control in there):
            _finish(
                state,
                update,
                cause=f"no engine has version {state.weights.base}, the full model that the "
                "adapters belong to; publish a full model",
            )
        return
    for control in targets:
        if update.pauses:
            state.fleet.control.enter(control, Mode.REFITTING)
        # An earlier reply, noted when the engine entered standby, does not count.
        update.answers.pop(control.name, None)
    update.enter(UpdatePhase.LOADING)
    update.refitting = frozenset(control.name for control in targets)
    update.loading_since = state.now
    names = tuple(control.name for control in targets)
    state.out.announce(
        facts.RefitBegun(
            version=update.version,
            engines=names,
            adapter=update.kind is UpdateKind.ADAPTER,
            external=update.external,
            followed=update.kind is UpdateKind.FOLLOWED,
        )
    )


def _is_ready(state: SchedulerState, update: Update, control: EngineControl) -> bool:
    """Return whether an engine is ready to load the version, or takes no part."""
    fleet = state.fleet.control
    if fleet.of(control.name) is not control:
        return True  # it is lost
    if control.catching_up:
        # An engine in use that is being refitted alone takes part after that.
        return control.name not in fleet.engines
    if update.external:
        # While a version query is open, its reply may name the previous version.
        return control.mode is not Mode.VERIFYING
    return update.kind is UpdateKind.ADAPTER or fleet.refittable(control)


def all_stop(fleet: Fleet, weights: Weights, rolling: bool) -> bool:
    """Return whether a sleep or an update stops all engines, so that none is refitted alone.

    With rolling refits, engines are still refitted alone while the sleep or update waits for
    evaluations, because these may need an engine that takes their version.
    """
    update, sleep = weights.update, fleet.sleep
    if not rolling:
        return update is not None or sleep is not None
    stops = update is not None and update.phase is not UpdatePhase.WAITING
    return stops or (sleep is not None and sleep.may_pause)


def catch_up(state: SchedulerState) -> None:
    """Bring engines to the fleet's version, each of them alone.

    These are engines on standby and, with rolling refits, engines in use that have finished the
    rollouts of an older version.
    """
    if all_stop(state.fleet, state.weights, state.rolling) or not state.weights.republishable:
        return
    for control in _paused_alone(state.fleet) if state.rolling else ():
        if state.fleet.control.refittable(control):
            state.fleet.control.enter(control, Mode.REFITTING)
            _refit_alone(state.weights, state.out, state.now, control)
    for control in state.fleet.control.standby.values():
        whole_fleet = not control.catching_up
        if whole_fleet and control.failed_version < state.weights.versions.trainer:
            _begin_catch_up(state, control)
        if whole_fleet and state.weights.adapter is not None:
            continue
        # An engine that failed is already paused and flushed, and no event follows.
        if control.catching_up and state.fleet.control.refittable(control):
            state.fleet.control.enter(control, Mode.REFITTING)
            _refit_alone(state.weights, state.out, state.now, control)


def _paused_alone(fleet: Fleet) -> list[EngineControl]:
    index = fleet.index
    index.refresh()
    paused = [kind for kind in index.kinds if kind.leaves and kind.mode is Mode.PAUSED]
    return index.in_order([c for kind in paused for c in index.kinds[kind].values()])


def _begin_catch_up(state: SchedulerState, control: EngineControl) -> None:
    if state.weights.adapter is None:
        # The fleet control issues the next calls, which pause and flush the engine.
        control.catching_up = True
        state.fleet.control.touch(control.name)
    elif _has_base(state.weights, control):
        control.catching_up = True
        _refit_alone(state.weights, state.out, state.now, control)


def _has_base(weights: Weights, control: EngineControl) -> bool:
    """Return whether the engine has the full model that the fleet's adapters belong to."""
    return control.base == weights.base and not control.inconsistent


def _refit_alone(weights: Weights, out: Outbox, now: float, control: EngineControl) -> None:
    control.loading, control.loading_since = weights.versions.trainer, now
    out.announce(
        facts.RefitBegun(
            version=weights.versions.trainer,
            engines=(control.name,),
            adapter=weights.adapter is not None,
            catch_up=True,
        )
    )


def _caught_up(state: SchedulerState, event: ev.Refitted) -> None:
    control = state.fleet.control.of(event.engine)
    if control is None:
        return
    control.catching_up = False
    state.fleet.control.touch(control.name)
    update = state.weights.update
    loads = update is not None and update.phase is UpdatePhase.LOADING
    took = event.version == control.loading and not event.cause and not loads
    if not took:
        control.failed_version = control.loading
        if control.name in state.fleet.control.engines:
            why = event.cause or f"it reports version {event.version}"
            demote(state, control.name, f"refit to version {control.loading} failed: {why}")
    elif control.name in state.fleet.control.engines:
        state.times.refits.add(state.now - control.loading_since)
        state.weights.versions.note(control.name, control.loading)
        control.base = control.loading
        control.version_seen_at, control.broken_connection = state.now, ""
    elif control.loading == state.weights.versions.trainer:
        promote(state, event.engine)
        if state.weights.adapter is not None:
            state.weights.adapters.setdefault(event.engine, set()).add(state.weights.adapter)


def _conclude(state: SchedulerState, update: Update) -> None:
    took = update.took() & {control.name for control in state.fleet.control.all()}
    failed = update.failed()
    old = state.weights.versions.trainer
    if update.kind is UpdateKind.FOLLOWED and _leads_astray(state, update, took):
        return
    for engine, why in failed:
        kept_old = update.answers[engine][0] == old
        stays = not took and kept_old
        if kept_old:
            _uncross(state.in_flight, engine, update)
        if engine in state.fleet.control.engines and not stays:
            demote(state, engine, f"refit to version {update.version} failed: {why}")
    if not took:
        if update.external:
            # An engine may have had the weights for a while and used them for evaluation tokens.
            _evaluate_again(state, update)
        elif update.kind is not UpdateKind.ADAPTER and not state.fleet.control.engines:
            # An engine with a part of the weights still reports its earlier label.
            state.weights.in_parts = True
        _finish(state, update, cause="; ".join(f"{engine}: {why}" for engine, why in failed))
        return
    if update.pauses:
        state.times.refits.add(state.now - update.loading_since)
    _publish(state, update, took)
    acknowledge(state, update.acknowledges)
    _finish(state, update, failed=failed)
    _enforce_bound(state)


def _roll_over(state: SchedulerState, update: Update) -> None:
    """Make the version the trainer's; each engine takes it alone, in :func:`catch_up`."""
    versions = state.weights.versions
    changes = update.version != versions.trainer
    versions.trainer = update.version
    state.weights.base, state.weights.republishable = update.version, update.republishable
    if changes:
        state.delivery.batches_since_update = 0
    state.stragglers.rejected_surplus.clear()
    # `in_parts` stays as it is: from now on, parts are loaded into one engine after the other.
    state.in_flight.counters.updates += 1
    acknowledge(state, update.acknowledges)
    _finish(state, update)
    _enforce_bound(state)


def _leads_astray(state: SchedulerState, update: Update, took: frozenset[str]) -> bool:
    """Return whether too few engines have moved to a followed version; these stand by."""
    there = list(state.fleet.control.all())
    if took and 2 * len(took) >= len(there):
        return False
    cause = f"{len(took)} of {len(there)} engines have version {update.version}"
    for control in there:
        if control.name in took:
            control.not_followed = control.base = update.version
            if control.name in state.fleet.control.engines:
                why = (
                    f"{cause} where the fleet has {state.weights.base}, so it was loaded by mistake"
                )
                demote(state, control.name, why)
        # An engine that joined later was not queried.
        elif update.answers.get(control.name, (None,))[0] == state.weights.versions.trainer:
            _uncross(state.in_flight, control.name, update)
        elif control.name in state.fleet.control.engines:
            demote(state, control.name, f"it did not report its version: {cause}")
    # Engines that have moved, now or earlier, sampled evaluation tokens of the wrong version.
    _evaluate_again(state, update)
    _finish(state, update, cause=cause)
    return True


def _publish(state: SchedulerState, update: Update, took: frozenset[str]) -> None:
    """Make the version the fleet's, and note it for every engine that took it."""
    old, adapter = state.weights.versions.trainer, update.kind is UpdateKind.ADAPTER
    # Sort by name: the cache keys are numbered, and a run must repeat exactly.
    for engine in sorted(took & state.fleet.control.engines.keys()):
        state.weights.versions.note(engine, update.version)
        control = state.fleet.control.engines[engine]
        control.version_seen_at, control.broken_connection = state.now, ""
        if update.external:
            # The client that loaded the version has resumed the engine.
            control.continued_elsewhere = control.mode is not Mode.RUNNING
            state.fleet.control.touch(engine)
        if not adapter:
            for request in state.in_flight.open_requests(engine):
                _cross(state.in_flight, request, update)
                kept = _keeps_keys(state, control, update)
                request.kept_keys = request.kept_keys or kept
                request.version = update.version
    state.weights.versions.publish(update.version)
    state.weights.republishable = update.republishable
    if adapter:
        # This must precede the use of an engine with this version. Otherwise its unchanged full
        # model would be taken for a model of this version, which no later adapter belongs to.
        state.weights.adapter = update.version
    for engine in sorted(took & state.fleet.control.standby.keys()):
        promote(state, engine)
    if adapter:
        for engine in took:
            state.weights.adapters.setdefault(engine, set()).add(update.version)
    else:
        state.weights.base, state.weights.adapter = update.version, None
        for engine in took:
            state.fleet.control.engines[engine].base = update.version
        if state.fleet.sleep is not None:
            # The new weights are in the engines' memory, and stay there.
            state.fleet.sleep.tags = state.fleet.sleep.away_in_refit
    if update.version != old:
        state.delivery.batches_since_update = 0
    if update.external:
        _evaluate_again(state, update)
    if not adapter:
        state.weights.in_parts = False
    state.in_flight.counters.updates += 1


def _cross(in_flight: InFlight, request: RequestRecord, update: Update) -> None:
    """Note that `update` reached the engine during the open attempt of `request`."""
    request.crossed = True
    if not update.labelled and request.rollout.log.exact:
        request.rollout.log.exact = False
        in_flight.journal.change(request.rollout)


def _keeps_keys(state: SchedulerState, control: EngineControl, update: Update) -> bool:
    """Return whether the engine's requests continued with KV of the older weights.

    If another client made the pause, only the setting shows whether the cache was flushed.
    """
    return state.cached_kv != "recompute" if update.external else control.keeps_keys


def _uncross(in_flight: InFlight, engine: str, update: Update) -> None:
    """Note that external weights did not reach the engine, so its requests have one version."""
    for request in in_flight.open_requests(engine):
        if request.request_id in update.met:
            request.crossed = request.unsure = False
            in_flight.journal.change(request.rollout)


def _evaluate_again(state: SchedulerState, update: Update) -> None:
    """Restart the running evaluations, because their responses would mix two versions."""
    cause = f"version {update.version} was loaded during the evaluation"
    for groups in state.evaluations.running.values():
        for group in list(groups):
            if group.dropped is None:
                drop(state, group, Reason.OTHER_VERSION, cause)
                launch_again(state, group)


def retire(state: SchedulerState) -> None:
    """Unload adapters that no open request samples with."""
    for engine, loaded in state.weights.adapters.items():
        if len(loaded) > 1 or state.weights.adapter is None:
            used = {request.adapter for request in state.in_flight.open_requests(engine)}
            for version in sorted(loaded - used - {state.weights.adapter}):
                loaded.remove(version)
                state.out.announce(facts.AdapterRetired(engine=engine, version=version))


def _finish(
    state: SchedulerState,
    update: Update,
    *,
    cause: str = "",
    failed: tuple[tuple[str, str], ...] = (),
) -> None:
    state.weights.update = None
    state.out.announce(facts.UpdateFinished(version=update.version, failed=failed, cause=cause))


def _enforce_bound(state: SchedulerState) -> None:
    """Drop or restart the groups that are too stale now."""
    gate, version = state.staleness, state.weights.versions.trainer
    cause = f"staleness above {gate.bound} at version {version}"
    for group in list(state.in_flight.training_groups()):
        if state.in_flight.siblings is not None:
            for member in list(group.members):
                if group.dropped is not None:
                    break  # without the previous member it was too small
                evicts = gate.evicts(member.log.oldest_version, version)
                if evicts and member.state is State.DONE:
                    # Otherwise the siblings of a member would depend on when it ends itself.
                    unit = group if group.source is not None else split(state, member)
                    drop(state, unit, Reason.STALE, cause)
                elif evicts:
                    drop(state, group, Reason.STALE, cause, culprit=member.rollout_id)
                elif gate.restarts(member.log.oldest_version, version):
                    restart_member(state, member, cause)
        elif gate.evicts(group.oldest_version, version):
            drop(state, group, Reason.STALE, cause)
        elif gate.restarts(group.oldest_version, version):
            begin_again(state, group, cause)
