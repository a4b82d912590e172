"""Restores a saved scheduler in a new process, so that the run continues.

State that exists only in a process is gone: attempts, calls of reward functions, episodes and
evaluations. Rollouts that were generating wait to be sent again with their tokens. Unknown rewards
and answers of the accept function are requested again. Evaluations belonged to their callers, so
their rollouts are in the ledger.

The settings may differ from those of the saved run. Therefore everything that follows from settings
is derived from the current ones: which rollouts are deferred, the schedule and how many groups it
keeps open, and which groups have to be scored and accepted. Otherwise the state could continue only
under the settings of the previous run and could never change again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from aprilsched.errors import ConfigError
from aprilsched.kernel.core.config import Caller
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.core.state.assembly import batch_again, launched
from aprilsched.kernel.core.state.delivery import BatchInWork, Delivery
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.ledger import Outcome, Reason
from aprilsched.kernel.core.state.records import (
    GENERATING,
    Branch,
    DeliveredBatch,
    GroupRecord,
    Replay,
    RequestRecord,
    RolloutRecord,
    State,
)
from aprilsched.kernel.core.state.saved import (
    GroupState,
    RolloutState,
    RunState,
    Saved,
    SavedBatch,
    SavedGroup,
    SavedMember,
    SavedRequest,
    SavedRun,
    SavedTokens,
    Stage,
    row_name,
)
from aprilsched.kernel.core.state.state import PromptSupply, SchedulerState
from aprilsched.kernel.core.state.token_log import TokenLog, clipped
from aprilsched.kernel.core.steps.episode_replay import leave_one
from aprilsched.kernel.core.steps.replan import fitting
from aprilsched.kernel.core.steps.scoring import ask_for_reward, ask_for_rewards, filter_or_accept
from aprilsched.kernel.core.steps.stragglers import release_all
from aprilsched.kernel.core.steps.target import retarget
from aprilsched.kernel.core.steps.turns import start_episode
from aprilsched.kernel.values.companions import CompanionLog
from aprilsched.types import Int32Array

_STATES = {
    Stage.GENERATING: State.QUEUED,
    Stage.GENERATED: State.SCORING,
    Stage.SCORED: State.DONE,
}


def restore(state: SchedulerState, saved: Saved) -> None:
    """Load a saved scheduler into `state`, before its first event.

    Raises:
        ConfigError: if the saved run cannot continue under the current settings.
    """
    if saved.run.episodes != state.caller.episodes:
        had = "had" if saved.run.episodes else "had not"
        raise ConfigError(
            f"the saved run {had} an episode function, and this one differs; give the same one, "
            "or a new store."
        )
    if (saved.run.siblings is None) != (state.in_flight.siblings is None):
        before = "groups" if saved.run.siblings is None else "samples"
        raise ConfigError(
            f'the saved run has delivery="{before}", and its groups cannot be delivered in another '
            "way; give the same delivery, or a new store."
        )
    _restore_run(state, saved)
    state.delivery.first_new_batch = saved.first_new_batch
    delivered = {group_id for batch in saved.batches for group_id in batch.group_ids}
    groups = {
        group.group_id: _group(state.caller, state.in_flight, saved, group)
        for group in saved.groups
        if group.group_id not in saved.damaged
    }
    for group_id, group in groups.items():
        if group_id in delivered and group.complete:
            continue
        if group_id in delivered or _left(saved, group):
            # The trainer's batch is damaged and cannot be redelivered, so the group is open again.
            _take_back(state.prompts, state.in_flight, group)
        _open_scores(state.caller, saved.run, group)
        _enter(state.in_flight, group)
        state.expectations.note_prompts(group.members)
        # A group without an explicit size shows nothing about the current configuration.
        size = state.config.group_size
        state.prompts.note_size(group.prompt.group_size or size, size)
    for group_id in saved.run.ready:
        if group_id in groups and groups[group_id].complete and groups[group_id].members:
            state.in_flight.ready.add(groups[group_id])
    # Complete groups that are not on the list: their batch is damaged, or they were completed after
    # the list was written.
    for group in state.in_flight.training_groups():
        if state.in_flight.splits(group):
            state.in_flight.unsettle(group)
        elif group.complete and group not in state.in_flight.ready:
            state.in_flight.ready.add(group)
    for group in groups.values():
        source = state.in_flight.groups.get(group.source or 0)
        if source is not None and group.group_id in state.in_flight.groups:
            source.samples += 1
    for group in list(state.in_flight.groups.values()):
        state.in_flight.forget_empty(group)
    for batch in saved.batches:
        _restore_batch(state.in_flight, state.delivery, batch, groups)
    _drop_damaged(state.prompts, state.in_flight, state.now, saved, delivered)
    if not state.plan.schedule.refill.defers:
        release_all(state.in_flight)
    if saved.run.target_groups:
        retarget(state)
    state.restored = True
    # Until then the engines may have the weights of another run.
    state.resumed = saved.run.counters.updates > 0


def call_again(state: SchedulerState) -> None:
    """Request again the open rewards, accept answers and episodes of the previous run."""
    for group in state.in_flight.training_groups():
        state.out.tell(launched(group, restored=True, tokens=state.tells_tokens))
        for member in group.members:
            if member.state is State.THINKING:
                start_episode(state.out, member)
            elif member.state is State.QUEUED and (request := member.request) is not None:
                start, limit = request.output_start, request.sampling.max_new_tokens
                leave_one(state.in_flight, state.out, member, start, limit)
            elif member.state is State.SCORING and state.caller.reward_scope == "rollout":
                ask_for_reward(state.out, member)
        if group.complete and group.accepted:
            state.out.tell(facts.GroupAccepted(group_id=group.group_id))
        if not group.complete or group.accepted or state.in_flight.splits(group):
            continue
        if group.scored:
            filter_or_accept(state, group)
        elif state.caller.reward_scope == "group":
            ask_for_rewards(state.out, group)


def _restore_run(state: SchedulerState, saved: Saved) -> None:
    run, in_flight = saved.run, state.in_flight
    in_flight.last_id = run.last_id
    in_flight.counters = replace(run.counters)
    in_flight.ledger.entries.extend(saved.dropped)
    in_flight.ledger.rollouts.update({Reason(name): n for name, n in run.dropped_rollouts.items()})
    in_flight.ledger.tokens.update({Reason(name): n for name, n in run.dropped_tokens.items()})
    for rollout_id, group_id, tokens in run.evaluating:
        cause = "its evaluation ended with the process that asked for it"
        entry = in_flight.enter(
            rollout_id, group_id, Reason.RESTARTED, cause, tokens=tokens, now=state.now
        )
        in_flight.journal.drop_saved(entry)
    state.prompts.cursor = run.cursor
    state.prompts.outcome = Outcome(
        delivered=run.delivered_groups, causes=Counter(run.failed_groups)
    )
    state.weights.versions.trainer = run.version
    state.weights.base, state.weights.adapter = run.base, run.adapter
    state.weights.in_parts = run.in_parts
    state.delivery.batches_since_update = run.batches_since_update
    state.delivery.fresh.seen = frozenset(run.seen_groups)
    state.plan.wave_due = run.wave_due
    state.plan.target_groups = run.target_groups
    _restore_schedule(state, saved.schedule)
    # The schedule was the best under the settings and engines of the previous run, so check it at
    # once.
    state.plan.checked_at_batch = -1
    state.expectations.note_limit(run.longest)
    for group in saved.lengths:
        state.expectations.observed.add_group(group)
    state.expectations.memory.restore(saved.remembered, *run.remembered_well)


def _restore_schedule(state: SchedulerState, schedule: Schedule | None) -> None:
    """Put the schedule of the previous run into force, if this process allows it."""
    if schedule is None or not state.config.automatic:
        return
    if state.config.pace != "auto":
        schedule = replace(schedule, pace=None)
    fits = fitting(state, schedule)
    if not isinstance(fits, str):
        state.plan.schedule = fits


def _group(caller: Caller, in_flight: InFlight, saved: Saved, group: SavedGroup) -> GroupRecord:
    now = saved.group_states.get(group.group_id) or GroupState(group_id=group.group_id)
    record = GroupRecord(
        group_id=group.group_id,
        prompt=group.prompt,
        opened=group.opened,
        again=group.again,
        accepted=now.accepted,
        first_run=now.first_run,
        lost=group.lost,
        source=group.source,
        siblings=group.siblings,
        few=group.source is not None and len(group.siblings) < (saved.run.siblings or 0),
    )
    for member in group.members:
        new = RolloutState(rollout_id=member.rollout_id, group_id=group.group_id)
        known = saved.rollouts.get(member.rollout_id, new)
        tokens = saved.tokens.get(member.rollout_id, SavedTokens())
        rollout = _rollout(caller, in_flight, record, member, known, tokens)
        size = rollout.log.size
        rollout.log.answers = tuple([each for each in known.answers if each.start <= size])
        in_flight.carry_companions(rollout)
        if known.branches:
            _restore_branches(rollout, known)
        for number, branch in enumerate(rollout.all_branches()):
            rows = {row_name(name, number): name for name in branch.companions}
            rollout.log.companions = branch.companions
            rollout.log.go_on(branch.path)
            rollout.log.restore_rows(
                [
                    (rows[each.name], each.start, each.rows)
                    for each in saved.companions.get(member.rollout_id, ())
                    if each.name in rows
                ],
                {rows[name]: parts for name, parts in known.foreign.items() if name in rows},
                prompt=len(branch.prompt_ids),
            )
        if rollout.branches:
            at_work = rollout.branches[rollout.branch]
            rollout.log.companions = at_work.companions
            rollout.log.go_on(at_work.path)
        record.members.append(rollout)
    there = {member.rollout_id: member for member in record.members}
    for each in now.ended:
        member = there.get(each.rollout_id)
        # The response of a member may be cut short.
        if member is None or member.state not in GENERATING:
            record.ended[each.rollout_id] = replace(each, at=None)
    record.size = len(record.members) + len(record.ended.keys() - there.keys())
    record.unfinished = sum(member.state in GENERATING for member in record.members)
    return record


def _restore_branches(rollout: RolloutRecord, known: RolloutState) -> None:
    """Restore the branches of a rollout, without their rows."""
    log, size = rollout.log, rollout.log.size
    prompts: list[Int32Array] = []
    for number, saved in enumerate(known.branches):
        own = np.array(saved.prompt_ids, dtype=np.int32) if saved.of is None else prompts[saved.of]
        prompts.append(own)
        path = clipped(saved.path, size)
        if number == known.branch:
            # Tokens that arrived after this record was saved belong to the last part of its path.
            *before, (last_start, _) = saved.path
            path = (
                *clipped(tuple(before), size),
                *(((last_start, size),) if last_start < size else ()),
            )
            log.go_on(path)
        rows = {name: CompanionLog(each.companion) for name, each in log.companions.items()}
        rollout.branches.append(Branch(prompt_ids=own, path=path, companions=rows))
    rollout.branch, rollout.prompt_ids = known.branch, prompts[known.branch]
    log.companions = rollout.branches[known.branch].companions


def _open_scores(caller: Caller, run: RunState, group: GroupRecord) -> None:
    """Find the members whose reward counts under the current settings; rescore the others."""
    generated = [m for m in group.members if m.state not in GENERATING]
    if caller.reward_scope == "none":
        for member in generated:
            member.state = State.DONE
    else:
        for member in generated:
            if member.reward is None:
                member.state = State.SCORING
        mixed = any(m.state is State.SCORING for m in group.members)
        if caller.reward_scope == "group" and mixed and not caller.episodes:
            # Rewards of one call must not be mixed with those of another.
            for member in generated:
                member.state, member.reward = State.SCORING, None
                member.reward_parts, member.info = {}, {}
    for member in group.members:
        if member.rollout_id in group.ended:
            group.ended[member.rollout_id].scored = member.state is State.DONE
    if not group.scored or (caller.accepts and not run.accepts):
        group.accepted = None


def _rollout(
    caller: Caller,
    in_flight: InFlight,
    group: GroupRecord,
    member: SavedMember,
    known: RolloutState,
    tokens: SavedTokens,
) -> RolloutRecord:
    runs = _runs(known, tokens)
    covered = known.runs[-1][0] if known.runs else 0
    # Fewer tokens than in the finished response: these are its first ones.
    cut_short = known.stage is not Stage.GENERATING and len(tokens.token_ids) < covered
    stage = Stage.GENERATING if cut_short else known.stage
    prompt = group.prompt.input_ids
    if known.prompt_ids is not None:
        prompt = np.array(known.prompt_ids, dtype=np.int32)
    record = RolloutRecord(
        rollout_id=member.rollout_id,
        index=member.index,
        group=group,
        sampling=member.sampling,
        state=_STATES[stage],
        prompt_ids=prompt,
        log=TokenLog.restored(
            tokens.token_ids,
            tokens.logprobs,
            runs,
            exact=known.exact,
            stale_keys=known.stale_keys,
        ),
        eligible=known.eligible,
        again=member.again,
        reward=None if cut_short else known.reward,
        reward_parts={} if cut_short else known.reward_parts,
        info={} if cut_short else known.info,
        finish_reason=known.finish_reason,
        answered=list(known.turns),
        turns=len(known.turns) if caller.episodes else 1,
        rewritten=cut_short or tokens.cut,
    )
    if stage is not Stage.GENERATING:
        return record
    if caller.episodes:
        _begin_again(record, known.request)
    else:
        record.turns = 0
        record.request = _request(in_flight, record, known.request)
    return record


def _begin_again(record: RolloutRecord, request: SavedRequest | None) -> None:
    record.state = State.THINKING
    record.answered = [turn for turn in record.answered if turn[1] <= record.log.size]
    record.turns = 0
    partial = None if request is None else request.output_start
    if partial is not None and partial > record.log.size:
        partial = None
    record.replay = Replay(known=len(record.answered), partial=partial)


def _request(
    in_flight: InFlight, rollout: RolloutRecord, known: SavedRequest | None
) -> RequestRecord:
    in_flight.last_id += 1
    request = RequestRecord(
        request_id=in_flight.last_id,
        rollout=rollout,
        sampling=rollout.sampling,
        output_start=0,
        attempt=1 if rollout.log.size else 0,
    )
    if known is not None:
        request.sampling, request.output_start = known.sampling, known.output_start
        request.attempt, request.failures = known.attempts, known.failures
        request.interruptions = known.interruptions
    return request


def _runs(known: RolloutState, tokens: SavedTokens) -> list[SavedRun]:
    """Return the runs that the engine reported; for tokens beyond them, those of their slices."""
    size = len(tokens.token_ids)
    runs: list[SavedRun] = []
    for end, version, engine in (*known.runs, *tokens.runs):
        covered = runs[-1][0] if runs else 0
        end = min(end, size)
        if end <= covered:
            continue
        if runs and runs[-1][1:] == (version, engine):
            runs[-1] = (end, version, engine)
        else:
            runs.append((end, version, engine))
    return runs


def _enter(in_flight: InFlight, group: GroupRecord) -> None:
    in_flight.groups[group.group_id] = group
    in_flight.training += bool(group.members)
    in_flight.training_rollouts += len(group.members)
    in_flight.generating += group.unfinished
    for member in group.members:
        in_flight.rollouts[member.rollout_id] = member
        if member.rewritten:
            in_flight.journal.change(member)
        request = member.request
        if request is None:
            continue
        in_flight.requests[request.request_id] = request
        if member.eligible:
            in_flight.queue.add(request)


def _restore_batch(
    in_flight: InFlight, delivery: Delivery, batch: SavedBatch, groups: dict[int, GroupRecord]
) -> None:
    members = [
        group
        for group_id in batch.group_ids
        if (group := groups.get(group_id)) is not None and group.complete
    ]
    for group in members:
        for member in group.members:
            member.state = State.DELIVERED
    record = DeliveredBatch(
        index=batch.index,
        version=batch.version,
        oldest_unmasked=batch.oldest_unmasked,
        groups=tuple(members),
    )
    delivery.redelivery.append(BatchInWork(known=batch_again(record)))
    delivery.unacknowledged[batch.index] = record
    if len(members) < len(batch.group_ids):
        # Another restart would count the others as delivered once they are complete again.
        in_flight.journal.deliver(record)


def _left(saved: Saved, group: GroupRecord) -> bool:
    """Return whether the group was in a batch whose record is damaged.

    Any other complete group is on the list of ready groups.
    """
    of_samples = saved.run.siblings is not None and group.source is None
    if group.group_id in saved.run.ready or of_samples:
        return False
    states = [saved.rollouts.get(member.rollout_id) for member in group.members]
    return all(known is not None and known.stage is not Stage.GENERATING for known in states)


def _take_back(prompts: PromptSupply, in_flight: InFlight, group: GroupRecord) -> None:
    counters = in_flight.counters
    counters.delivered -= len(group.members)
    prompts.outcome.delivered -= group.source is None
    counters.tokens_delivered -= sum(member.log.sampled_tokens for member in group.members)
    group.accepted = None


def _drop_damaged(
    prompts: PromptSupply, in_flight: InFlight, now: float, saved: Saved, delivered: set[int]
) -> None:
    members = {group.group_id: group.members for group in saved.groups}
    for group_id, cause in saved.damaged.items():
        # If the group cannot be read, its rollouts are those that name it. The first rollout's id
        # follows the group's id.
        known = [s.rollout_id for s in saved.rollouts.values() if s.group_id == group_id]
        named = [m.rollout_id for m in members.get(group_id, ())] or known or [group_id + 1]
        for rollout_id in named:
            tokens = saved.tokens.get(rollout_id)
            lost = 0 if tokens is None else len(tokens.token_ids)
            in_flight.counters.delivered -= group_id in delivered
            entry = in_flight.enter(
                rollout_id, group_id, Reason.DAMAGED, cause, tokens=lost, now=now
            )
            in_flight.journal.drop_saved(entry)
        prompts.outcome.delivered -= group_id in delivered
        prompts.outcome.fail(cause)
    if saved.damaged:
        # The number of rollouts of a group that cannot be read is not known.
        counters = in_flight.counters
        counters.launched = counters.delivered + in_flight.ledger.total + len(in_flight.rollouts)
