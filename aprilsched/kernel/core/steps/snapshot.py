"""Takes snapshots for the store: what changed since the last one, or everything."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.core.state.journal import Journal, PageBuilder
from aprilsched.kernel.core.state.ledger import Counters
from aprilsched.kernel.core.state.records import (
    GENERATING,
    DeliveredBatch,
    GroupRecord,
    RolloutRecord,
    State,
)
from aprilsched.kernel.core.state.saved import (
    GroupState,
    RolloutState,
    RunState,
    SavedBatch,
    SavedBranch,
    SavedGroup,
    SavedMember,
    SavedRequest,
    SavedRows,
    Snapshot,
    Stage,
    TokenPage,
    row_name,
)
from aprilsched.kernel.core.state.state import Evaluations, SchedulerState
from aprilsched.kernel.core.steps.batch import ended_prompts, masked_tokens
from aprilsched.kernel.values.companions import CompanionLog


def take_changes(state: SchedulerState) -> Snapshot:
    """Take a snapshot of the changes in the journal, and empty the journal."""
    journal = state.in_flight.journal
    snapshot = Snapshot(
        full=False,
        run=_run(state),
        schedule=_schedule(state),
        page=_arrived(journal),
        groups=tuple(_group(group) for group in journal.launched.values()),
        group_states=tuple(_group_state(group) for group in journal.changed_groups.values()),
        rollouts=tuple(_rollout(rollout) for rollout in journal.changed.values()),
        companions=_new_rows(journal),
        batches=tuple(_batch(batch) for batch in journal.delivered.values()),
        acknowledged=tuple(journal.acknowledged),
        removed=tuple(journal.removed),
        dropped=tuple(journal.dropped),
        lengths=tuple(journal.lengths),
        remembered=tuple(journal.remembered.values()),
    )
    for rollout in journal.changed.values():
        rollout.rewritten = False
    journal.clear()
    return snapshot


def full_snapshot(state: SchedulerState) -> Snapshot:
    """Return a full snapshot without side effects: the journal is not emptied."""
    offered = (
        ()
        if state.delivery.offer is None or state.delivery.offer.record is None
        else (state.delivery.offer.record,)
    )
    return _everything(state, _run(state), (*state.delivery.unacknowledged.values(), *offered))


def take_checkpoint(state: SchedulerState, *, without: Collection[int]) -> Snapshot:
    """Return a full snapshot for the trainer's checkpoint, with the offered batch not taken.

    Args:
        without: numbers of the batches that the trainer has learned from; they are left out.
    """
    kept = [batch for index, batch in state.delivery.unacknowledged.items() if index not in without]
    return _everything(state, _run(state, taken=False), kept)


def _everything(
    state: SchedulerState, run: RunState, batches: Sequence[DeliveredBatch]
) -> Snapshot:
    delivered = {group.group_id for batch in batches for group in batch.groups}
    # Those without members too, which stay for their samples.
    known = [group for group in state.in_flight.groups.values() if group.evaluation_id is None]
    groups = [group for group in known if group.group_id not in delivered]
    for batch in batches:
        groups.extend(batch.groups)
    rollouts = [member for group in groups for member in group.members]
    return Snapshot(
        full=True,
        run=run,
        schedule=_schedule(state),
        page=_held(rollouts),
        groups=tuple(_group(group) for group in groups),
        group_states=tuple(_group_state(group) for group in groups),
        rollouts=tuple(_rollout(rollout) for rollout in rollouts),
        companions=[rows for rollout in rollouts for rows in _rows(rollout)],
        batches=tuple(_batch(batch) for batch in batches),
        dropped=tuple(state.in_flight.ledger.entries),
        lengths=tuple(state.expectations.observed.cohort()),
        remembered=tuple(state.expectations.memory),
    )


def take_full(state: SchedulerState) -> Snapshot:
    """Take a full snapshot, which replaces the content of the store, and empty the journal."""
    snapshot = full_snapshot(state)
    for group in state.in_flight.training_groups():
        for member in group.members:
            member.rewritten = False
    state.in_flight.journal.clear()
    return snapshot


def _arrived(journal: Journal) -> TokenPage | None:
    """Return the tokens to save.

    These are the tokens since the last snapshot, without the rollouts that have left, and all
    tokens of the rewritten rollouts.
    """
    again = [rollout for rollout in journal.changed.values() if rollout.rewritten]
    journal.arrived.forget(journal.gone.union(rollout.rollout_id for rollout in again))
    _add_all(journal.arrived, again)
    return journal.arrived.page()


def _new_rows(journal: Journal) -> list[SavedRows]:
    """Return the rows to save: the new ones, and all rows of the rewritten rollouts."""
    found = [rows for each in journal.changed.values() if each.rewritten for rows in _rows(each)]
    for rollout, first_rows in journal.rows_from.values():
        if not rollout.rewritten:
            found += _rows(rollout, first_rows)
    return found


def _rows(
    rollout: RolloutRecord, first_rows: Mapping[str, int] | None = None
) -> Iterator[SavedRows]:
    """Return the rows of the rollout's companions.

    With `begin`, return only rows of the active branch, from these rows on.
    """
    for number, name, log in _companions(rollout):
        if first_rows is not None and number != rollout.branch:
            continue
        start = 0 if first_rows is None else first_rows[name]
        if log.held > start:
            yield SavedRows(
                group_id=rollout.group.group_id,
                rollout_id=rollout.rollout_id,
                name=row_name(name, number),
                start=start,
                rows=log.since(start),
            )


def _companions(rollout: RolloutRecord) -> Iterator[tuple[int, str, CompanionLog]]:
    """Return the rows of each branch, with its number and the name of the companion."""
    if rollout.log.companions:
        for number, branch in enumerate(rollout.all_branches()):
            for name, log in branch.companions.items():
                yield number, name, log


def _held(rollouts: Iterable[RolloutRecord]) -> TokenPage | None:
    """Return a page with all tokens of these rollouts."""
    builder = PageBuilder()
    _add_all(builder, rollouts)
    return builder.page()


def _add_all(builder: PageBuilder, rollouts: Iterable[RolloutRecord]) -> None:
    for rollout in rollouts:
        first_rows = 0
        ids, logprobs = rollout.log.since(0)
        for end, version, engine in rollout.log.runs:
            builder.add(
                rollout, first_rows, ids[first_rows:end], logprobs[first_rows:end], version, engine
            )
            first_rows = end


def _group(group: GroupRecord) -> SavedGroup:
    return SavedGroup(
        group_id=group.group_id,
        prompt=group.prompt,
        opened=group.opened,
        again=group.again,
        lost=group.lost,
        source=group.source,
        siblings=group.siblings,
        members=tuple(
            SavedMember(rollout_id=m.rollout_id, index=m.index, sampling=m.sampling, again=m.again)
            for m in group.members
        ),
    )


def _group_state(group: GroupRecord) -> GroupState:
    return GroupState(
        group_id=group.group_id,
        accepted=group.accepted,
        first_run=group.first_run,
        ended=tuple(group.ended.values()),
    )


def _rollout(rollout: RolloutRecord) -> RolloutState:
    group = rollout.group
    own_prompt = rollout.prompt_ids is not group.prompt.input_ids and not rollout.branches
    unsure = rollout.request is not None and rollout.request.unsure
    return RolloutState(
        rollout_id=rollout.rollout_id,
        group_id=group.group_id,
        stage=_stage(rollout),
        rewritten=rollout.rewritten,
        runs=rollout.log.runs,
        exact=rollout.log.exact and not unsure,
        finish_reason=rollout.finish_reason,
        reward=rollout.reward,
        eligible=rollout.eligible,
        prompt_ids=tuple(rollout.prompt_ids.tolist()) if own_prompt else None,
        turns=tuple(rollout.answered),
        branches=tuple(_branches(rollout)) if rollout.branches else (),
        branch=rollout.branch,
        request=_request(rollout),
        stale_keys=rollout.log.stale_keys,
        reward_parts=rollout.reward_parts,
        info=rollout.info,
        answers=rollout.log.answers,
        foreign={
            row_name(name, number): log.foreign
            for number, name, log in _companions(rollout)
            if log.foreign
        },
    )


def _branches(rollout: RolloutRecord) -> Iterator[SavedBranch]:
    seen: dict[int, int] = {}
    for number, branch in enumerate(rollout.all_branches()):
        of = seen.setdefault(id(branch.prompt_ids), number)
        own = of == number
        yield SavedBranch(
            path=rollout.log.open_path if number == rollout.branch else branch.path,
            prompt_ids=tuple(branch.prompt_ids.tolist()) if own else (),
            of=None if own else of,
        )


def _stage(rollout: RolloutRecord) -> Stage:
    if rollout.state in GENERATING:
        return Stage.GENERATING
    return Stage.GENERATED if rollout.state is State.SCORING else Stage.SCORED


def _request(rollout: RolloutRecord) -> SavedRequest | None:
    request = rollout.request
    if request is None or rollout.state not in GENERATING or rollout.state is State.THINKING:
        return None
    return SavedRequest(
        output_start=request.output_start,
        sampling=request.sampling,
        attempts=request.attempt,
        failures=request.failures,
        interruptions=request.interruptions,
    )


def _batch(batch: DeliveredBatch) -> SavedBatch:
    return SavedBatch(
        index=batch.index,
        version=batch.version,
        oldest_unmasked=batch.oldest_unmasked,
        group_ids=tuple(group.group_id for group in batch.groups),
    )


def _run(state: SchedulerState, *, taken: bool = True) -> RunState:
    """Return the data of the run itself.

    The offered batch counts as `taken`, because the trainer may take it before the next snapshot.
    After a restart the trainer gets the same batch again.
    """
    in_flight = state.in_flight
    groups = () if state.delivery.offer is None else state.delivery.offer.groups
    ready = tuple(group.group_id for group in in_flight.ready)
    if not taken:
        ready = (*(group.group_id for group in groups), *ready)
        groups = ()
    return RunState(
        last_id=in_flight.last_id,
        cursor=state.prompts.cursor,
        episodes=state.caller.episodes,
        ready=ready,
        version=state.weights.versions.trainer,
        base=state.weights.base,
        adapter=state.weights.adapter,
        counters=_counters(state) if groups else replace(in_flight.counters),
        dropped_rollouts={str(reason): n for reason, n in in_flight.ledger.rollouts.items()},
        dropped_tokens={str(reason): n for reason, n in in_flight.ledger.tokens.items()},
        evaluating=_evaluating(state.evaluations),
        wave_due=state.plan.wave_due,
        target_groups=state.plan.target_groups,
        longest=state.expectations.limit,
        batches_since_update=state.delivery.batches_since_update + bool(groups),
        accepts=state.caller.accepts,
        siblings=in_flight.siblings,
        seen_groups=_seen_groups(state),
        in_parts=state.weights.in_parts,
        delivered_groups=state.prompts.outcome.delivered + ended_prompts(in_flight, groups),
        failed_groups=dict(state.prompts.outcome.causes),
        remembered_well=(state.expectations.memory.products, state.expectations.memory.squares),
        process=state.process,
    )


def _counters(state: SchedulerState) -> Counters:
    """Return the counters as they are once the offered batch is taken."""
    counters = replace(state.in_flight.counters)
    if state.delivery.offer is not None:
        counters.batches += 1
        counters.tokens_masked += masked_tokens(state.delivery.offer.batch)
        for group in state.delivery.offer.groups:
            counters.delivered += len(group.members)
            counters.tokens_delivered += sum(m.log.sampled_tokens for m in group.members)
    return counters


def _seen_groups(state: SchedulerState) -> tuple[int, ...]:
    """Return the groups of the fresh batch that the trainer has or is offered.

    Once its last part is offered, the whole batch is saved.
    """
    delivery, work = state.delivery, state.delivery.fresh
    offer = None if delivery.redelivery else delivery.offer
    if offer is not None and offer.part.last:
        return ()
    offered = () if offer is None else offer.part.units
    return (*work.seen, *work.taken, *(unit.unit_id for unit in offered))


def _schedule(state: SchedulerState) -> Schedule | None:
    return state.plan.schedule if state.config.automatic else None


def _evaluating(evaluations: Evaluations) -> tuple[tuple[int, int, int], ...]:
    return tuple(
        (member.rollout_id, group.group_id, member.log.sampled_tokens)
        for groups in evaluations.running.values()
        for group in groups
        if group.dropped is None
        for member in group.members
    )
