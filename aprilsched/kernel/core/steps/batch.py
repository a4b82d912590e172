"""Decides when a batch is full, when its parts are offered, and when it is delivered.

A batch is *full* when enough is generated. A part is *offered* when it is scored and accepted, one
part at a time (:func:`~aprilsched.kernel.core.policies.parts.next_part`). A whole batch is offered
as one part. Between a full batch and its offer, the engines continue with the other open groups
(:func:`awaits_scores`). The batch is *delivered* when the trainer has taken its last part.

Between an offer and its delivery the trainer may stop waiting, a store may be slow, or a new
version may arrive. A new version withdraws the offer, and its groups, which are still in flight,
become ready again. If the trainer already has some parts of a batch, an update or a request for a
whole batch ends the batch with these parts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.policies.parts import Part, Supply, next_part
from aprilsched.kernel.core.state.assembly import batch_again, batch_of
from aprilsched.kernel.core.state.delivery import BatchInWork, Delivery, Offered
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.records import DeliveredBatch, GroupRecord
from aprilsched.kernel.core.state.state import PromptSupply, SchedulerState
from aprilsched.kernel.core.steps.target import retarget
from aprilsched.types import Batch


def on_batch_requested(state: SchedulerState, event: ev.BatchRequested) -> None:
    if event.streamed != state.delivery.by_group:
        withdraw_offer(state)
    if not event.streamed:
        end_stream(state)
    state.delivery.by_group = event.streamed
    _request(state)


def _request(state: SchedulerState) -> None:
    delivery = state.delivery
    if not delivery.takes_parts:
        state.out.tell(facts.BatchRequested())
    if not delivery.batch_requested and not state.asynchronous:
        state.plan.wave_due = True
        state.plan.groups_unchosen = True
    delivery.demand = "waiting"


def on_batch_withdrawn(state: SchedulerState, _: ev.BatchWithdrawn) -> None:
    """Keep the batch in work.

    Otherwise a trainer that polls would start a wave on every call and pause the engines between
    two calls, so their requests would lose their KV.
    """
    state.out.tell(facts.BatchRequestWithdrawn())
    if state.delivery.batch_requested:
        state.delivery.demand = "left"


def on_batches_acknowledged(state: SchedulerState, event: ev.BatchesAcknowledged) -> None:
    acknowledge(state, event.batches)


def on_trainer_returned(state: SchedulerState, event: ev.TrainerReturned) -> None:
    """Redeliver the batches that the trainer lacks, in the order of their first delivery."""
    delivery, has = state.delivery, set(event.groups)
    waiting = {batch.index: batch for batch in delivery.batches_again}
    ids = {
        index: {group.group_id for group in record.groups}
        for index, record in delivery.unacknowledged.items()
    }
    # A batch delivered in parts may have ended since, with only the parts taken so far.
    missing = [index for index in ids if index not in event.batches and not ids[index] <= has]
    works = [
        BatchInWork(known=waiting.get(index) or batch_again(delivery.unacknowledged[index]))
        for index in missing
    ]
    if works and works[0].known is not None:
        works[0].taken = {u.unit_id: u for u in works[0].known.units if u.unit_id in has}
    taken = [group for group in state.in_flight.ready if group.group_id in has]
    same = {group.group_id for group in taken} == delivery.fresh.taken.keys()
    if same and _taken_units(works) == _taken_units(delivery.redelivery):
        return
    # An offer of a redelivered batch belongs to the first batch in the queue, which changes here.
    withdraw_offer(state)
    delivery.redelivery = deque(works)
    delivery.fresh.taken = {u.unit_id: u for u in _batch_of(state, taken).units}


def _taken_units(works: Iterable[BatchInWork]) -> list[tuple[int, set[int]]]:
    """Return the index of each batch that is delivered again, and the ids of its taken units."""
    return [(work.known.index, {*work.taken}) for work in works if work.known is not None]


def on_logprobs_reported(state: SchedulerState, event: ev.LogprobsReported) -> None:
    """Record the report as a fact for the log and the summary; it triggers no decision."""
    state.out.tell(facts.LogprobsCompared(comparison=event.comparison))


def acknowledge(state: SchedulerState, batches: Iterable[int]) -> None:
    """Forget batches that need no redelivery; ignore those already acknowledged."""
    batches = tuple(index for index in batches if index in state.delivery.unacknowledged)
    if batches:
        state.out.tell(facts.BatchesAcknowledged(batches=batches))
    for index in batches:
        batch = state.delivery.unacknowledged.pop(index, None)
        if batch is None:
            continue
        state.in_flight.journal.acknowledge(batch)
        for group in batch.groups:
            state.in_flight.release(group)


def handed_over(in_flight: InFlight, delivery: Delivery) -> tuple[int, ...]:
    """Return the numbers of the batches that the trainer has but has not acknowledged.

    The batch of which it has some groups is included. After a restart the trainer has none of them
    until they are redelivered.
    """
    waiting = {batch.index for batch in delivery.batches_again}
    whole = tuple(index for index in delivery.unacknowledged if index not in waiting)
    return (*whole, in_flight.counters.batches) if delivery.fresh.taken else whole


def full(state: SchedulerState) -> bool:
    """Return whether enough is generated for the current batch; rewards may be missing."""
    if not state.stop.enough(state.in_flight.ready):
        return False
    groups, version = state.in_flight.groups, state.weights.versions.trainer
    return not state.delivery.must_deliver.grows(groups, version)


def awaits_scores(state: SchedulerState) -> bool:
    """Return whether the engines keep running although a synchronous batch is full.

    This holds while the batch waits for rewards or verdicts and more groups are open than it takes,
    because the tokens of these groups are kept. Pausing the engines here costs half of the
    throughput when rewards take 20 s.
    """
    caller = state.caller
    return (
        (caller.reward_scope != "none" or caller.accepts)
        and state.plan.target_groups > state.batch_groups
        and state.staleness.rule != "restart"
        and full(state)
        and not state.stop.enough(state.in_flight.ready.accepted)
    )


def training_runs(state: SchedulerState) -> bool:
    """Return whether training rollouts should be generated now."""
    refits = state.weights.update is not None and state.weights.update.pauses
    if refits or state.fleet.sleep is not None or state.fleet.paused_by_trainer:
        return False
    if state.asynchronous:
        return True
    return state.delivery.collecting and (not full(state) or awaits_scores(state))


def deliver_evaluations(state: SchedulerState) -> None:
    """Deliver every evaluation that has ended.

    This waits while an external update is open: until every engine has reported its version, the
    tokens may come from two versions.
    """
    running, update = state.evaluations.running, state.weights.update
    if not running or (update is not None and update.external):
        return
    for evaluation_id in list(running):
        _deliver_evaluation(state, evaluation_id)


def offer(state: SchedulerState) -> None:
    """Offer the next part of the batch in work, if the trainer wants it and it is ready."""
    delivery = state.delivery
    if not delivery.takes_parts or delivery.offer is not None or state.weights.update is not None:
        return
    work = delivery.work
    if work.known is not None:
        left = work.rest(work.known.units)
        again = Supply(units=left, measure=lambda _: 1, lacking=len(left), exact=True, ends=True)
        part = next_part(again, whole=not delivery.by_group)
        if part is not None:
            content = replace(work.known, units=part.units, complete=part.last)
            _show(state, Offered(part=part, content=content, batch=work.known))
        return
    if not _may_offer(state):
        return
    chosen = next_part(_supply(state, work), whole=not delivery.by_group)
    if chosen is None:
        return
    if chosen.last and not chosen.units and not work.taken:
        _end_prompts(state)
    elif chosen.last:
        _show(state, _close(state, chosen.units))
    else:
        batch = _batch_of(state, chosen.units, redelivered=_may_have(state, chosen.units))
        batch = replace(batch, complete=False)
        part = Part(units=batch.units, last=False)
        _show(state, Offered(part=part, content=batch, batch=batch))


def _may_offer(state: SchedulerState) -> bool:
    """Return whether scanning the ready groups can find a part; called after every event."""
    delivery, accepted = state.delivery, state.in_flight.ready.accepted
    if not (
        state.stop.enough(accepted)
        or (delivery.by_group and len(accepted) > len(delivery.fresh.taken))
        or _drained(state.prompts, state.in_flight)
    ):
        return False
    if delivery.by_group:
        return True
    return not delivery.must_deliver.waits(state.in_flight.groups, state.weights.versions.trainer)


def _supply(state: SchedulerState, work: BatchInWork) -> Supply[GroupRecord]:
    """Return the units that can complete the batch.

    Required units come first, then those that the trainer may already have, then the others in the
    order of their completion.
    """
    must, version = state.delivery.must_deliver, state.weights.versions.trainer
    stop, groups = state.stop, state.in_flight.groups
    units = [
        group
        for group in state.in_flight.ready
        if group.accepted and group.group_id not in work.taken
    ]
    due = {group.group_id for group in units if must.has(group, version)}
    units.sort(key=lambda group: (group.group_id not in due, group.group_id not in work.seen))
    return Supply(
        units=units,
        measure=stop.measure,
        lacking=stop.amount - sum(stop.measure(groups[unit]) for unit in work.taken),
        due=len(due),
        awaited=len(must.waiting(groups, version)),
        exact=stop.fixed_groups,
        ends=_drained(state.prompts, state.in_flight),
    )


def _end_prompts(state: SchedulerState) -> None:
    state.delivery.demand = "none"
    state.out.tell(facts.PromptsEnded())
    prompts, share = state.prompts, state.config.retries.failed_share
    batches = state.in_flight.counters.batches
    error = prompts.outcome.end(prompts.cursor, share, batches=batches)
    state.out.commands.append(do.EndOfPrompts(error=error))


def _show(state: SchedulerState, offered: Offered) -> None:
    state.delivery.offer = offered
    if offered.part.last:
        state.out.tell(facts.BatchOffered(batch=offered.batch.index, version=offered.batch.version))
    state.out.commands.append(do.Offer(offered=offered.content))


def end_stream(state: SchedulerState) -> None:
    """Deliver the fresh batch with only the parts that the trainer has, which ends it."""
    delivery = state.delivery
    if not delivery.fresh.taken:
        return
    withdraw_offer(state)
    requested_again = delivery.trainer_waits
    _deliver(state, _close(state, ()), unsaved=True)
    if requested_again:
        _request(state)


def _batch_of(
    state: SchedulerState, groups: Sequence[GroupRecord], *, redelivered: bool = False
) -> Batch:
    """Return the fresh batch of these groups, as consumed at the trainer's version."""
    version = state.weights.versions.trainer
    return batch_of(
        groups,
        index=state.in_flight.counters.batches,
        version=version,
        oldest_unmasked=state.staleness.oldest_unmasked(version),
        redelivered=redelivered,
        made=state.delivery.fresh.taken,
    )


def _may_have(state: SchedulerState, groups: Iterable[GroupRecord]) -> bool:
    """Return whether the trainer may have parts of the batch, or `groups`, since a restart."""
    delivery = state.delivery
    lost = state.in_flight.counters.batches < delivery.first_new_batch
    return lost or any(group.group_id in delivery.fresh.seen for group in groups)


def _close(state: SchedulerState, last: Sequence[GroupRecord]) -> Offered:
    """Close the fresh batch with its `last` part, whose groups no other batch may take."""
    work = state.delivery.fresh
    groups = [*(state.in_flight.groups[unit] for unit in work.taken), *last]
    batch = _batch_of(state, groups, redelivered=_may_have(state, groups))
    for group in groups:
        state.in_flight.ready.remove(group)
        group.offered = True
    record = DeliveredBatch(
        index=batch.index,
        version=batch.version,
        oldest_unmasked=state.staleness.oldest_unmasked(batch.version),
        groups=tuple(groups),
    )
    state.in_flight.journal.deliver(record)
    rest = work.rest(batch.units)
    offered = state.delivery.offer = Offered(
        part=Part(units=rest, last=True),
        content=replace(batch, units=rest) if work.taken else batch,
        batch=batch,
        record=record,
        target_groups=state.plan.target_groups,
    )
    # The next batch starts after this one and counts it as an earlier batch.
    state.expectations.renew()
    retarget(state)
    state.plan.wave_due = state.plan.wave_due or state.asynchronous
    return offered


def withdraw_offer(state: SchedulerState) -> None:
    """Withdraw the offer, if any, and put its groups before all other ready groups.

    A batch names the version that consumes it, and its masks follow from that version. A new
    version makes the batch wrong.
    """
    offered, state.delivery.offer = state.delivery.offer, None
    if offered is None:
        return
    if offered.record is not None:
        for group in offered.groups:
            group.offered = False
        state.in_flight.ready.put_back(offered.groups)
        state.in_flight.journal.withdraw(offered.record)
        state.plan.target_groups = offered.target_groups
    if offered.part.last:
        state.out.tell(facts.OfferWithdrawn(batch=offered.batch.index))
    state.out.commands.append(do.WithdrawOffer(index=offered.batch.index))


def on_batch_taken(state: SchedulerState, event: ev.BatchTaken) -> None:
    delivery, work = state.delivery, state.delivery.work
    offered = delivery.offer
    if offered is None or offered.batch.index != event.index:
        raise InvariantViolation(f"batch {event.index} was taken and not offered")
    delivery.offer = None
    state.times.take()
    if not offered.part.last:
        work.take(offered.part)
        if delivery.takes_parts:
            delivery.demand = "between_parts"
        if work.known is None:
            for unit in offered.part.units:
                state.out.tell(facts.GroupStreamed(batch=event.index, group_id=unit.unit_id))
    elif work.known is not None:
        delivery.demand = "none"
        delivery.redelivery.popleft()
        _tell_delivery(state, offered.batch, again=True)
    else:
        _deliver(state, offered)


def _deliver(state: SchedulerState, offered: Offered, *, unsaved: bool = False) -> None:
    batch, delivery = offered.batch, state.delivery
    delivery.demand, delivery.fresh, delivery.offer = "none", BatchInWork(), None
    # This must precede the removal of the groups from flight, which releases their lengths.
    prompts_of = ended_prompts(state.in_flight, offered.groups)
    distances = state.expectations.distances(
        offered.groups,
        state.in_flight.training_groups(),
        unit_size=None if state.in_flight.siblings is None else state.prompts.usual_size,
    )
    for group in offered.groups:
        state.in_flight.deliver(group)
    if state.in_flight.journal.active and offered.record is not None:
        delivery.unacknowledged[batch.index] = offered.record
    state.in_flight.counters.batches += 1
    state.prompts.outcome.delivered += prompts_of
    delivery.batches_since_update += 1
    delivered = _tell_delivery(state, batch, again=False, distances=distances)
    state.in_flight.counters.tokens_masked += sum([r.masked for r in delivered])
    state.out.commands.append(do.Deliver(batch=batch, unsaved=unsaved))


def ended_prompts(in_flight: InFlight, units: Sequence[GroupRecord]) -> int:
    """Return the number of prompts of which nothing is in flight once these units are delivered."""
    samples = Counter(unit.source for unit in units)
    ended = samples.pop(None, 0)
    for source, count in samples.items():
        group = in_flight.groups.get(source or 0)
        ended += group is not None and not group.members and group.samples == count
    return ended


def _tell_delivery(
    state: SchedulerState,
    batch: Batch,
    *,
    again: bool,
    distances: tuple[float, float] | None = None,
) -> Sequence[facts.DeliveredRollout]:
    rollouts = facts.delivered_rollouts(batch, tokens=state.tells_tokens)
    distance, iid_distance = distances or (None, None)
    state.out.tell(
        facts.BatchDelivered(
            batch=batch.index,
            version=batch.version,
            rollouts=rollouts,
            again=again,
            distance=distance,
            iid_distance=iid_distance,
        )
    )
    return rollouts


def masked_tokens(batch: Batch) -> int:
    """Return the number of sampled tokens in the batch that are masked as too stale."""
    return sum(rollout.masked for rollout in facts.delivered_rollouts(batch))


def _deliver_evaluation(state: SchedulerState, evaluation_id: int) -> None:
    groups = [group for group in state.evaluations.running[evaluation_id] if group.dropped is None]
    if not all(group.accepted for group in groups):
        return
    del state.evaluations.running[evaluation_id]
    batch = batch_of(groups, index=evaluation_id, version=state.weights.versions.trainer)
    for group in groups:
        state.in_flight.deliver(group)
    state.out.tell(
        facts.EvaluationDelivered(
            evaluation_id=evaluation_id,
            version=batch.version,
            rollouts=facts.delivered_rollouts(batch, tokens=state.tells_tokens),
        )
    )
    state.out.commands.append(do.DeliverEvaluation(evaluation_id=evaluation_id, batch=batch))


def _drained(prompts: PromptSupply, in_flight: InFlight) -> bool:
    """Return whether the prompts have ended and every remaining group is accepted."""
    if not prompts.exhausted or prompts.stock or prompts.fetching:
        return False
    ready = in_flight.ready
    return len(ready) == in_flight.training == len(ready.accepted)
