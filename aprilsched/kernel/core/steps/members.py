"""Decides what happens to a group that loses a member (``retries.member``).

A member is lost to the infrastructure: the attempts of its request are used up, no engine can
continue it, or user code raised :class:`~aprilsched.errors.MemberLost`. An episode that fails after
engines refused its turn is lost too. A refused request of one turn, or any other error of user
code, would fail again in the same way, so it drops the whole group.

The lost member is split off into a separate group, which is dropped. So the ledger contains every
rollout and every token, and late answers for the lost member affect no other group.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import GENERATING, GroupRecord, RolloutRecord, State
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.steps.drop import drop
from aprilsched.kernel.core.steps.scoring import ask_for_reward, ask_for_rewards, filter_or_accept
from aprilsched.kernel.core.steps.turns import start_episode


def lose_member(state: SchedulerState, rollout: RolloutRecord, reason: Reason, cause: str) -> None:
    """Remove a lost member from its group, and replace it if the rule allows that.

    A group that cannot continue is dropped with `reason`.
    """
    group, retries = rollout.group, state.config.retries
    generates = rollout.state in GENERATING
    again = retries.member == "again" and generates and rollout.again < retries.regenerations
    smallest = 1 if group.evaluation_id is not None else retries.smallest_group
    shrinks = retries.member == "shrink" and group.size > smallest
    if not (again or shrinks):
        drop(state, group, reason, cause, culprit=rollout.rollout_id)
        return
    was_complete = group.complete
    drop(state, state.in_flight.lose(group, rollout), Reason.MEMBER_LOST, cause)
    if again:
        _launch_again(state, group, rollout)
    else:
        state.in_flight.forget_empty(group)
    if group.complete and group.members:
        _complete(state, group, was_complete=was_complete)


def restart_member(state: SchedulerState, rollout: RolloutRecord, cause: str) -> None:
    """Discard the tokens of one rollout, and generate it again."""
    group = rollout.group
    if group.source is not None and group.source not in state.in_flight.groups:
        drop(state, group, Reason.STALE, cause)
        return
    if group.source is not None:
        group = state.in_flight.rejoin(group)
    drop(state, state.in_flight.lose(group, rollout), Reason.BEGUN_AGAIN, cause)
    _launch_again(state, group, rollout, failed=False)


def _launch_again(
    state: SchedulerState, group: GroupRecord, lost: RolloutRecord, *, failed: bool = True
) -> None:
    episodes = state.caller.episodes
    rollout = state.in_flight.add_again(group, lost, episodes=episodes, failed=failed)
    state.out.tell(
        facts.MemberLaunched(
            group_id=group.group_id,
            rollout_id=rollout.rollout_id,
            instead_of=lost.rollout_id,
            evaluation_id=group.evaluation_id,
        )
    )
    if episodes:
        start_episode(state.out, rollout)


def _complete(state: SchedulerState, group: GroupRecord, *, was_complete: bool) -> None:
    """Continue with a group that was waiting only for the lost member."""
    splits = state.in_flight.splits(group)
    if group.evaluation_id is None:
        if not splits:
            state.in_flight.ready.add(group)
        if not was_complete:
            state.note_lengths(group)
    if splits:
        return
    if group.scored:
        filter_or_accept(state, group)
    elif state.caller.reward_scope == "group" and not was_complete:
        ask_for_rewards(state.out, group)


def on_episode_failed(
    state: SchedulerState, rollout: RolloutRecord, event: ev.EpisodeFailed
) -> None:
    if event.lost:
        lose_member(state, rollout, Reason.EPISODE_FAILED, event.cause)
    else:
        drop(state, rollout.group, Reason.EPISODE_FAILED, event.cause, culprit=event.rollout_id)


def on_teardown_failed(state: SchedulerState, event: ev.TeardownFailed) -> None:
    state.in_flight.counters.teardowns_failed += 1
    state.out.tell(facts.TeardownFailed(rollout_id=event.rollout_id, cause=event.cause))


def on_reward_failed(state: SchedulerState, group: GroupRecord, event: ev.RewardFailed) -> None:
    rollout = state.in_flight.rollouts.get(event.rollout_id or 0)
    if rollout is None or rollout.state is not State.SCORING or not event.lost:
        splits = state.in_flight.splits(group) and rollout in group.members
        culprit = event.rollout_id if splits else None
        drop(state, group, Reason.REWARD_FAILED, event.cause, culprit=culprit)
        return
    retries = state.config.retries
    if retries.member == "again" and rollout.again < retries.regenerations:
        # The response is complete, so only the reward function is called again.
        rollout.again += 1
        ask_for_reward(state.out, rollout)
    else:
        lose_member(state, rollout, Reason.REWARD_FAILED, event.cause)
