"""Decides when a batch is full, when it is offered, and when it is delivered.

A batch is *full* when enough is generated. It is *offered* when enough of that is scored and
accepted, one batch at a time. In between, the engines go on with the groups that are open beyond
the batch (:func:`awaits_scores`). It is *delivered* when the trainer has taken it. Between an offer
and its delivery the trainer may give up its wait, a store may be slow, and a new version may come.
For a new version the offer is withdrawn, and its groups, which have not left flight, are ready
again.

A trainer may also take the groups of a batch one by one, each as soon as it is accepted. Every
group but the last is offered as a part of the batch, and stays in flight as a ready group when it
is taken. With the last group the batch as a whole is offered and delivered as any other. An update
or a request for a whole batch ends a streamed batch with the groups that were taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from aprilsched.core.lengths.observed import DEFAULT_WINDOW, GroupLengths
from aprilsched.core.messages import commands as do
from aprilsched.core.messages import events as ev
from aprilsched.core.messages import facts
from aprilsched.core.state.assembly import batch_again, batch_of
from aprilsched.core.state.records import DeliveredBatch, GroupRecord, Offered, group_lengths
from aprilsched.core.state.state import SchedulerState
from aprilsched.errors import InvariantViolation
from aprilsched.types import Batch


def on_batch_requested(state: SchedulerState, event: ev.BatchRequested) -> None:
    offered = state.delivery.offer
    if offered is not None and offered.streamed != event.streamed:
        withdraw_offer(state)
    if not event.streamed:
        end_stream(state)
    state.delivery.by_group = event.streamed
    state.delivery.has_part = False
    _request(state)


def _request(state: SchedulerState) -> None:
    delivery = state.delivery
    if not delivery.called:
        state.tell(facts.BatchRequested())
        delivery.called = True
    if not delivery.batch_requested and not state.asynchronous:
        state.plan.wave_pending = True
        state.plan.choice_pending = True
    delivery.batch_requested = True


def on_batch_withdrawn(state: SchedulerState, _: ev.BatchWithdrawn) -> None:
    """The batch stays in work. A trainer that polls for it had begun a wave at each call, and had
    paused the engines in between, where their requests lose their KV."""
    state.tell(facts.BatchRequestWithdrawn())
    state.delivery.called = False


def on_batches_acknowledged(state: SchedulerState, event: ev.BatchesAcknowledged) -> None:
    acknowledge(state, event.batches)


def on_trainer_returned(state: SchedulerState, event: ev.TrainerReturned) -> None:
    """Deliver again what the trainer does not have. Batches keep the order of their delivery."""
    delivery, has = state.delivery, set(event.groups)
    waiting = {batch.index: batch for batch in delivery.redelivery}
    ids = {
        index: {group.group_id for group in record.groups}
        for index, record in delivery.unacknowledged.items()
    }
    # A batch that was taken group by group may have ended since, with the groups that were taken.
    missing = [index for index in ids if index not in event.batches and not ids[index] <= has]
    again = has & ids[missing[0]] if missing else set[int]()
    streamed = [group for group in state.in_flight.ready if group.group_id in has]
    same = {group.group_id for group in streamed} == delivery.streamed.keys()
    if same and missing == list(waiting) and again == delivery.streamed_again:
        return
    # An offer that is a batch delivered again must stay the first of those that wait.
    withdraw_offer(state)
    delivery.redelivery = deque(
        waiting.get(index) or batch_again(delivery.unacknowledged[index]) for index in missing
    )
    delivery.streamed_again = again
    groups = _batch_in_work(state, streamed).groups
    delivery.streamed = {group.group_id: group for group in groups}


def _batch_in_work(
    state: SchedulerState, groups: Sequence[GroupRecord], *, redelivered: bool = False
) -> Batch:
    """The batch in work with these groups, as the trainer's version consumes it."""
    version = state.weights.versions.trainer
    return batch_of(
        groups,
        index=state.in_flight.counters.batches,
        version=version,
        oldest_unmasked=state.staleness.oldest_unmasked(version),
        redelivered=redelivered,
        made=state.delivery.streamed,
    )


def on_logprobs_reported(state: SchedulerState, event: ev.LogprobsReported) -> None:
    """A report decides nothing; it becomes a fact, so that it is in the log and the summary."""
    state.tell(facts.LogprobsCompared(comparison=event.comparison))


def acknowledge(state: SchedulerState, batches: Iterable[int]) -> None:
    """Forget batches that need not be delivered again. Batches acknowledged before are ignored."""
    batches = tuple(index for index in batches if index in state.delivery.unacknowledged)
    if batches:
        state.tell(facts.BatchesAcknowledged(batches=batches))
    for index in batches:
        batch = state.delivery.unacknowledged.pop(index, None)
        if batch is None:
            continue
        state.in_flight.journal.acknowledge(batch)
        for group in batch.groups:
            state.in_flight.release(group)


def handed_over(state: SchedulerState) -> tuple[int, ...]:
    """Numbers of the batches that the trainer has and has not acknowledged, with the one of which
    it has some groups. After a restart it has none of them until they are delivered again."""
    waiting = {batch.index for batch in state.delivery.redelivery}
    whole = tuple(index for index in state.delivery.unacknowledged if index not in waiting)
    return (*whole, state.in_flight.counters.batches) if state.delivery.streamed else whole


def full(state: SchedulerState) -> bool:
    """Whether enough is generated for the present batch. Rewards may still be missing."""
    if not state.stop.enough(state.in_flight.ready):
        return False
    groups, version = state.in_flight.groups, state.weights.versions.trainer
    return not state.delivery.must_deliver.grows(groups, version)


def awaits_scores(state: SchedulerState) -> bool:
    """Whether the engines go on although the batch is full, on the synchronous pace: it waits for
    rewards or verdicts, and more groups are open than it takes, whose tokens are kept.

    Engines that stood meanwhile lost half of their time with rewards of 20 s.
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
    """Whether training rollouts should be generated now."""
    refits = state.weights.update is not None and state.weights.update.pauses
    if refits or state.fleet.sleep is not None or state.fleet.held:
        return False
    if state.asynchronous:
        return True
    return state.collecting and (not full(state) or awaits_scores(state))


def deliver_evaluations(state: SchedulerState) -> None:
    """Deliver every evaluation that has ended.

    This waits while an external update is open, because the tokens may be of two versions until
    every engine has said which version it has.
    """
    update = state.weights.update
    if update is not None and update.external:
        return
    for evaluation_id in list(state.evaluations.running):
        _deliver_evaluation(state, evaluation_id)


def offer(state: SchedulerState) -> None:
    """Offer the next batch if it is requested and complete, and no other is offered."""
    delivery = state.delivery
    wanted = delivery.called and state.collecting
    if not wanted or delivery.offer is not None or state.weights.update is not None:
        return
    if delivery.redelivery:
        _offer_again(state, delivery.redelivery[0])
        return
    if delivery.by_group:
        _offer_next_group(state)
        return
    if not (state.stop.enough(state.in_flight.ready) or _drained(state)):
        return
    # What follows looks at every complete group, so it is not done before there can be an offer.
    if not (state.stop.enough(state.in_flight.ready.accepted) or _drained(state)):
        return
    must, version = state.delivery.must_deliver, state.weights.versions.trainer
    if must.waits(state.in_flight.groups, version):
        return
    accepted = [group for group in state.in_flight.ready if group.accepted]
    due = 0
    if state.delivery.groups_given:
        accepted.sort(key=lambda group: group.group_id not in state.delivery.groups_given)
    if state.staleness.finishes:
        # Groups that the batch must contain go first; otherwise the order of completion
        # stays.
        accepted.sort(key=lambda group: not must.has(group, version))
        due = sum(must.has(group, version) for group in accepted)
    count = state.stop.take(accepted)
    if count is not None and not state.stop.fixed_groups:
        # What a group counts was not known when it was admitted. A batch holds at least its
        # amount, so it may hold more.
        count = max(count, due)
    if count is None:
        count = len(accepted)
    if count == 0:
        _end_prompts(state)
    else:
        _offer_batch(state, _composed(state, accepted[:count]))


def _end_prompts(state: SchedulerState) -> None:
    state.delivery.end_request()
    state.tell(facts.PromptsEnded())
    prompts, share = state.prompts, state.config.retries.failed_share
    state.commands.append(do.EndOfPrompts(error=prompts.outcome.end(prompts.cursor, share)))


def _offer_batch(state: SchedulerState, offered: Offered) -> None:
    state.delivery.offer = offered
    state.tell(facts.BatchOffered(batch=offered.batch.index, version=offered.batch.version))
    state.commands.append(do.Offer(offered=offered.given))


def _offer_part(state: SchedulerState, part: Batch) -> None:
    state.delivery.offer = Offered(batch=part, streamed=True)
    state.commands.append(do.Offer(offered=part))


def _offer_again(state: SchedulerState, batch: Batch) -> None:
    """Offer a batch of before the restart, or the next group of it."""
    has, by_group = state.delivery.streamed_again, state.delivery.by_group
    left = tuple(group for group in batch.groups if group.group_id not in has)
    if by_group and len(left) > 1:
        _offer_part(state, replace(batch, groups=left[:1], complete=False))
    else:
        rest = replace(batch, groups=left)
        _offer_batch(state, Offered(batch=batch, last_part=rest, streamed=by_group))


def _offer_next_group(state: SchedulerState) -> None:
    """Offer the next group of a batch that the trainer takes group by group, if there is one."""
    accepted = state.in_flight.ready.accepted
    too_few = len(accepted) == len(state.delivery.streamed) and not state.stop.enough(accepted)
    if too_few and not _drained(state):
        return  # the trainer has every group that is accepted
    streamed, ready = state.delivery.streamed, list(state.in_flight.ready)
    taken = [group for group in ready if group.group_id in streamed]
    waiting = [group for group in ready if group.accepted and group.group_id not in streamed]
    due = {group.group_id for group in _required(state, waiting)}
    enough = bool(taken) and state.stop.take(taken) is not None
    # Groups that the batch must contain go first, and room is left for those that still generate.
    given = state.delivery.groups_given
    waiting.sort(key=lambda group: (group.group_id not in due, group.group_id not in given))
    room = not (enough or state.stop.fixed_groups) or len(taken) + len(due) < state.stop.amount
    fits = [group for group in waiting if room or group.group_id in due]
    if fits:
        then = [*taken, fits[0]]
        left = due - {fits[0].group_id}
        drained = _drained(state) and len(waiting) == 1
        if (state.stop.take(then) is not None and not left) or drained:
            _offer_last_part(state, then)
        else:
            part = _batch_in_work(state, fits[:1], redelivered=_may_have(state, fits[:1]))
            _offer_part(state, replace(part, complete=False))
    elif (enough and not due) or _drained(state):
        # The groups that the batch still waited for were dropped.
        if taken:
            _offer_last_part(state, taken)
        else:
            _end_prompts(state)


def _offer_last_part(state: SchedulerState, groups: list[GroupRecord]) -> None:
    """Offer the batch of `groups`, of which the trainer has all but the last already."""
    offered = _composed(state, groups)
    rest = tuple(g for g in offered.batch.groups if g.group_id not in state.delivery.streamed)
    last_part = replace(offered.batch, groups=rest)
    _offer_batch(state, replace(offered, last_part=last_part, streamed=True))


def end_stream(state: SchedulerState) -> None:
    """Deliver the groups that the trainer has of a streamed batch as a batch, which ends it."""
    streamed = state.delivery.streamed
    if not streamed:
        return
    withdraw_offer(state)
    groups = [group for group in state.in_flight.ready if group.group_id in streamed]
    offered = _composed(state, groups)
    waits = state.delivery.called and not state.delivery.has_part
    state.delivery.offer = None
    _deliver(state, offered, unsaved=True)
    if waits:
        _request(state)


def _may_have(state: SchedulerState, groups: Iterable[GroupRecord]) -> bool:
    """Whether the trainer may have the batch in work, or some of `groups`, from before the run was
    resumed."""
    delivery = state.delivery
    lost = state.in_flight.counters.batches < delivery.given
    return lost or any(group.group_id in delivery.groups_given for group in groups)


def _composed(state: SchedulerState, groups: list[GroupRecord]) -> Offered:
    """Offer the batch of `groups`, which are not ready for another one any more."""
    batch = _batch_in_work(state, groups, redelivered=_may_have(state, groups))
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
    offered = Offered(batch=batch, record=record, target_groups=state.plan.target_groups)
    # The next batch begins after it, and counts it among those before.
    state.delivery.offer = offered
    state.expectations.renew()
    retarget(state)
    state.plan.wave_pending = state.plan.wave_pending or state.asynchronous
    return offered


def withdraw_offer(state: SchedulerState) -> None:
    """Withdraw the offer, if there is one: its groups are ready again, before all others.

    The batch names the version that it is consumed at, and its masks follow from that version, so
    it is wrong once a new version comes.
    """
    offered = state.delivery.offer
    if offered is None:
        return
    state.delivery.offer = None
    if offered.record is not None:
        for group in offered.groups:
            group.offered = False
        state.in_flight.ready.put_back(offered.groups)
        state.in_flight.journal.withdraw(offered.record)
        state.plan.target_groups = offered.target_groups
    if offered.given.complete:
        state.tell(facts.OfferWithdrawn(batch=offered.batch.index))
    state.commands.append(do.WithdrawOffer(index=offered.batch.index))


def on_batch_taken(state: SchedulerState, event: ev.BatchTaken) -> None:
    offered = state.delivery.offer
    if offered is None or offered.batch.index != event.index:
        raise InvariantViolation(f"batch {event.index} was taken and not offered")
    state.delivery.offer = None
    state.times.take()
    if not offered.given.complete:
        _note_part(state, offered.batch)
        return
    if offered.record is None:
        state.delivery.end_request()
        state.delivery.redelivery.popleft()
        state.delivery.streamed_again = set()
        _tell_delivery(state, offered.batch, again=True)
    else:
        _deliver(state, offered)


def _note_part(state: SchedulerState, part: Batch) -> None:
    """Note that the trainer has taken a part of a batch."""
    state.delivery.has_part = True
    if state.delivery.redelivery:
        state.delivery.streamed_again |= {group.group_id for group in part.groups}
        return
    for group in part.groups:
        state.delivery.streamed[group.group_id] = group
        state.tell(facts.GroupStreamed(batch=part.index, group_id=group.group_id))


def _deliver(state: SchedulerState, offered: Offered, *, unsaved: bool = False) -> None:
    batch = offered.batch
    state.delivery.end_request()
    state.delivery.streamed, state.delivery.groups_given = {}, set()
    # Before the groups leave flight, because their lengths are released then.
    distances = state.expectations.distances(offered.groups, state.in_flight.training_groups())
    for group in offered.groups:
        state.in_flight.deliver(group)
    if state.in_flight.journal.active and offered.record is not None:
        state.delivery.unacknowledged[batch.index] = offered.record
    state.in_flight.counters.batches += 1
    state.prompts.outcome.delivered += len(offered.groups)
    state.delivery.batches_since_update += 1
    delivered = _tell_delivery(state, batch, again=False, distances=distances)
    state.in_flight.counters.tokens_masked += sum([r.masked for r in delivered])
    state.commands.append(do.Deliver(batch=batch, unsaved=unsaved))


def _tell_delivery(
    state: SchedulerState,
    batch: Batch,
    *,
    again: bool,
    distances: tuple[float, float] | None = None,
) -> Sequence[facts.DeliveredRollout]:
    rollouts = facts.delivered_rollouts(batch, tokens=state.tells_tokens)
    distance, iid_distance = distances or (None, None)
    state.tell(
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
    """Number of sampled tokens in the batch that are masked because they are too stale."""
    return sum(rollout.masked for rollout in facts.delivered_rollouts(batch))


def _deliver_evaluation(state: SchedulerState, evaluation_id: int) -> None:
    groups = [group for group in state.evaluations.running[evaluation_id] if group.dropped is None]
    if not all(group.accepted for group in groups):
        return
    del state.evaluations.running[evaluation_id]
    batch = batch_of(groups, index=evaluation_id, version=state.weights.versions.trainer)
    for group in groups:
        state.in_flight.deliver(group)
    state.tell(
        facts.EvaluationDelivered(
            evaluation_id=evaluation_id,
            version=batch.version,
            rollouts=facts.delivered_rollouts(batch, tokens=state.tells_tokens),
        )
    )
    state.commands.append(do.DeliverEvaluation(evaluation_id=evaluation_id, batch=batch))


def _required(state: SchedulerState, accepted: list[GroupRecord]) -> list[GroupRecord]:
    """Groups in flight that the batch must contain: those that are not accepted, and those among
    the `accepted`."""
    must, version = state.delivery.must_deliver, state.weights.versions.trainer
    due = [group for group in accepted if must.has(group, version)]
    return due + must.waiting(state.in_flight.groups, version)


def _drained(state: SchedulerState) -> bool:
    """Whether the prompts have ended and every group that is left is accepted."""
    if not state.prompts.exhausted or state.prompts.stock or state.prompts.fetching:
        return False
    ready = state.in_flight.ready
    return len(ready) == state.in_flight.training == len(ready.accepted)


# --- target --------------------------------------------------------------------------------------

# Decides how many groups are kept open for the present batch, and how many a batch takes.
#
# If a batch is full by tokens, the number of groups that it takes is estimated from the lengths
# seen so far, where unfinished responses are censored. Until a response has finished, the estimate
# is ``batch_groups``.


def retarget(state: SchedulerState) -> None:
    """Decide how many groups are kept open for the next batch, which begins now, or again in the
    middle of a batch, because it may take more or fewer groups than was estimated."""
    state.plan.usual_group = _usual_group(state)
    state.plan.target_groups = state.plan.schedule.target_groups(state.batch_groups)


def _usual_group(state: SchedulerState) -> float:
    """What one group is expected to count towards a batch."""
    size = state.prompts.usual_size

    def group_tokens() -> float | None:
        law = state.expectations.observed.law(_newest(state))
        return None if law is None else size * law.mean()

    usual = state.stop.usual_group(size, group_tokens)
    return state.plan.usual_group if usual is None else usual


def _newest(state: SchedulerState) -> list[GroupLengths]:
    """The open groups that were launched last. The estimate is of so many responses, and a pool
    that is refilled asks for it all the time."""
    newest: list[GroupLengths] = []
    responses = 0
    for group in reversed(state.in_flight.groups.values()):
        if responses >= DEFAULT_WINDOW:
            break
        if group.evaluation_id is None and not group.complete:
            newest.append(group_lengths(group))
            responses += len(group.members)
    return newest[::-1]
