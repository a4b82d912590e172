"""When a batch is full, and when it is handed over.

*Full* looks at what is generated, so a slow reward never delays the stop of a batch; *handed
over* is what is also scored and accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aprilsched.core.assembly import batch_of
from aprilsched.core.commands import Deliver, DeliverEvaluation, EndOfPrompts, Redeliver
from aprilsched.core.events import BatchesAcknowledged, BatchRequested, BatchWithdrawn
from aprilsched.core.records import GroupRecord
from aprilsched.core.saving.journal import DeliveredBatch
from aprilsched.core.state import SchedulerState
from aprilsched.core.target import retarget
from aprilsched.types import NO_VERSION

__all__ = [
    "acknowledge",
    "deliver",
    "deliver_evaluations",
    "full",
    "handed_over",
    "on_batch_requested",
    "on_batch_withdrawn",
    "on_batches_acknowledged",
    "training_runs",
]


def on_batch_requested(state: SchedulerState, _: BatchRequested) -> None:
    state.wanted = True
    if not state.asynchronous:
        state.wave_due = True
        state.round_due = True


def on_batch_withdrawn(state: SchedulerState, _: BatchWithdrawn) -> None:
    state.wanted = False


def on_batches_acknowledged(state: SchedulerState, event: BatchesAcknowledged) -> None:
    acknowledge(state, event.batches)


def acknowledge(state: SchedulerState, batches: Iterable[int]) -> None:
    """Forget what would be delivered again; a batch that is acknowledged already is ignored."""
    for index in batches:
        batch = state.unacknowledged.pop(index, None)
        if batch is None:
            continue
        state.book.journal.acknowledge(batch)
        for group in batch.groups:
            state.book.release(group)


def handed_over(state: SchedulerState) -> tuple[int, ...]:
    """Batches that the trainer has and did not acknowledge. After a restart it has none until it
    is given them again."""
    waiting = {batch.index for batch in state.redelivery}
    return tuple(index for index in state.unacknowledged if index not in waiting)


def full(state: SchedulerState) -> bool:
    """Is enough generated for the batch in work? Rewards may still be outstanding."""
    if not state.rules.stop.enough(state.book.ready):
        return False
    return all(group.complete for group in _due(state))


def training_runs(state: SchedulerState) -> bool:
    """Should training rollouts be generated now?"""
    refits = state.update is not None and not state.update.beside
    if refits or state.sleep is not None:
        return False
    return state.asynchronous or (state.wanted and not full(state))


def deliver_evaluations(state: SchedulerState) -> None:
    """Hand over every evaluation that has ended."""
    for evaluation_id in list(state.evaluations):
        _deliver_evaluation(state, evaluation_id)


def deliver(state: SchedulerState) -> None:
    """Hand over the batch if it is wanted and there."""
    if not state.wanted or state.update is not None:
        return
    if state.redelivery:
        state.wanted = False
        state.commands.append(Redeliver(batch=state.redelivery.popleft()))
        return
    if not (state.rules.stop.enough(state.book.ready) or _drained(state)):
        return
    accepted = [group for group in state.book.ready if group.accepted]
    if state.rules.staleness.rule == "finish":
        # What is due first; within both kinds in the order of completion.
        version = state.tracker.trainer
        accepted.sort(key=lambda group: not state.due.has(group, version))
    count = state.rules.stop.take(accepted)
    if count is None:
        if not _drained(state):
            return
        count = len(accepted)
    elif not all(group.accepted for group in _due(state)):
        return
    state.wanted = False
    if count == 0:
        state.commands.append(EndOfPrompts())
    else:
        _deliver_batch(state, accepted[:count])


def _deliver_batch(state: SchedulerState, groups: list[GroupRecord]) -> None:
    version = state.tracker.trainer
    counters = state.book.counters
    oldest_unmasked = state.rules.staleness.oldest_unmasked(version)
    batch = batch_of(
        groups, index=counters.batches, version=version, oldest_unmasked=oldest_unmasked
    )
    for group in groups:
        state.book.deliver(group)
    if state.book.journal.active:
        state.unacknowledged[batch.index] = delivered = DeliveredBatch(
            index=batch.index,
            version=version,
            oldest_unmasked=oldest_unmasked,
            groups=tuple(groups),
        )
        state.book.journal.deliver(delivered)
    counters.batches += 1
    state.expectations.renew()
    retarget(state)
    if oldest_unmasked is not None:
        counters.tokens_masked += sum(
            int((rollout.versions[~rollout.loss_mask] != NO_VERSION).sum())
            for rollout in batch.rollouts
            if not rollout.loss_mask.all()
        )
    state.delivered_since_update += len(groups)
    state.wave_due = state.wave_due or state.asynchronous
    state.commands.append(Deliver(batch=batch))


def _deliver_evaluation(state: SchedulerState, evaluation_id: int) -> None:
    groups = [group for group in state.evaluations[evaluation_id] if group.dropped is None]
    if not all(group.accepted for group in groups):
        return
    del state.evaluations[evaluation_id]
    batch = batch_of(groups, index=evaluation_id, version=state.tracker.trainer)
    for group in groups:
        state.book.deliver(group)
    state.commands.append(DeliverEvaluation(evaluation_id=evaluation_id, batch=batch))


def _due(state: SchedulerState) -> Iterator[GroupRecord]:
    """Open groups that the batch must have."""
    return state.due.open(state.book.groups, state.tracker.trainer)


def _drained(state: SchedulerState) -> bool:
    """The prompts have ended and every group that is left has its verdict."""
    if not state.exhausted or state.stock or state.fetching:
        return False
    ready = state.book.ready
    return len(ready) == state.book.training and all(group.accepted for group in ready)
