"""Build the immutable data for users and listeners from the mutable records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.records import (
    GENERATING,
    DeliveredBatch,
    GroupRecord,
    RolloutRecord,
)
from aprilsched.kernel.core.state.token_log import TokenLog, common
from aprilsched.types import Batch, FinishReason, Group, Int32Array, Rollout, Sample, Unit


def rollout_of(record: RolloutRecord, *, oldest_unmasked: int | None = None) -> Rollout:
    """Return the rollout so far, with tokens older than version `oldest_unmasked` masked."""
    if not record.branches:
        return _sequence(record, record.prompt_ids, record.log, oldest_unmasked)
    ends: dict[int, FinishReason] = {branch: why for _, _, why, branch in record.answered}
    branches = record.all_branches()

    def sequence(number: int, later: tuple[Rollout, ...] = ()) -> Rollout:
        branch = branches[number]
        log = record.log.part(branch.path)
        log.companions = branch.companions
        return _sequence(
            record,
            branch.prompt_ids,
            log,
            oldest_unmasked,
            finish_reason=ends.get(number, record.finish_reason),
            shared=max([common(branch.path, each.path) for each in branches[:number]], default=0),
            branches=later,
        )

    return sequence(0, tuple([sequence(number) for number in range(1, len(branches))]))


def _sequence(
    record: RolloutRecord,
    prompt_ids: Int32Array,
    log: TokenLog,
    oldest_unmasked: int | None,
    *,
    finish_reason: FinishReason | None = None,
    shared: int = 0,
    branches: tuple[Rollout, ...] = (),
) -> Rollout:
    """Return one token sequence of a rollout; an earlier one contains its first `shared` tokens."""
    versions = log.versions()
    mask = log.sampled()
    mask[:shared] = False
    if oldest_unmasked is not None:
        oldest = log.oldest_version
        if oldest is not None and oldest < oldest_unmasked:
            mask &= versions >= oldest_unmasked
    companions = log.companion_rows(prompt=len(prompt_ids))
    for name, rows in companions.items():
        if log.companions[name].companion.required:
            mask &= rows.exact
    return Rollout(
        rollout_id=record.rollout_id,
        group_id=record.group.origin,
        index=record.index,
        prompt_ids=prompt_ids,
        token_ids=log.token_ids,
        logprobs=log.logprobs(),
        versions=versions,
        loss_mask=mask,
        segments=log.segments(),
        versions_exact=log.exact,
        stale_keys=log.stale_keys,
        finish_reason=finish_reason or record.finish_reason,
        reward=record.reward,
        reward_parts=dict(record.reward_parts),
        # A copy, so that the caller cannot change the saved state through the rollout.
        info=deepcopy(record.info) if record.info else {},
        turns=record.turns,
        companions=companions,
        # A copy, for the same reason.
        answers=deepcopy(log.answers) if log.answers else (),
        shared=shared,
        branches=branches,
    )


def unit_of(record: GroupRecord, *, oldest_unmasked: int | None = None) -> Unit:
    """Return a whole group, or a single sample."""
    if record.source is None:
        return group_of(record, oldest_unmasked=oldest_unmasked)
    (member,) = record.members
    return Sample(
        rollout=rollout_of(member, oldest_unmasked=oldest_unmasked),
        prompt=record.prompt,
        siblings=record.siblings,
        few=record.few,
    )


def group_of(record: GroupRecord, *, oldest_unmasked: int | None = None) -> Group:
    """Return a whole group, with its members in the order of their index."""
    return Group(
        group_id=record.group_id,
        prompt=record.prompt,
        rollouts=tuple(rollout_of(m, oldest_unmasked=oldest_unmasked) for m in record.members),
    )


def batch_of(
    records: Sequence[GroupRecord],
    *,
    index: int,
    version: int,
    oldest_unmasked: int | None = None,
    redelivered: bool = False,
    made: Mapping[int, Unit] | None = None,
) -> Batch:
    """Return a batch of these units that the trainer consumes at `version`.

    `made` contains, by id, the units that the trainer already has; they are reused.
    """
    made = made or {}
    return Batch(
        index=index,
        version=version,
        units=tuple(
            made.get(record.group_id) or unit_of(record, oldest_unmasked=oldest_unmasked)
            for record in records
        ),
        redelivered=redelivered,
    )


def batch_again(record: DeliveredBatch) -> Batch:
    """Return a delivered batch for another delivery."""
    return batch_of(
        record.groups,
        index=record.index,
        version=record.version,
        oldest_unmasked=record.oldest_unmasked,
        redelivered=True,
    )


def launched(
    record: GroupRecord, *, restored: bool = False, tokens: bool = False
) -> facts.GroupLaunched:
    """Return the fact that the group is in flight; with `tokens` it contains the prompt."""
    lengths = None
    if restored:
        members = record.members
        lengths = facts.RestoredLengths(
            tokens=tuple(m.log.size for m in members),
            sampled=tuple(m.log.sampled_tokens for m in members),
            finished=tuple(m.state not in GENERATING for m in members),
        )
    prompt = record.prompt
    return facts.GroupLaunched(
        group_id=record.group_id,
        rollout_ids=tuple([member.rollout_id for member in record.members]),
        prompt_tokens=len(prompt.input_ids),
        evaluation_id=record.evaluation_id,
        restored=lengths,
        again=record.again,
        key=prompt.key if tokens else None,
        input_ids=prompt.input_ids.tolist() if tokens else None,
    )
