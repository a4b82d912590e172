"""Takes rollouts from generated to accepted: rewards, and the user's accept function."""

from __future__ import annotations

from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.assembly import group_of, rollout_of, unit_of
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import GroupRecord, RolloutRecord, State
from aprilsched.kernel.core.state.state import Outbox, SchedulerState
from aprilsched.kernel.core.steps.drop import count_rejection, drop
from aprilsched.types import Score


def finish(state: SchedulerState, rollout: RolloutRecord, score: Score | None) -> None:
    """Finish a fully generated rollout; `score` comes from its episode, if it returned one."""
    group = rollout.group
    state.in_flight.finish(rollout, state.now)
    state.out.tell(facts.RolloutFinished(rollout_id=rollout.rollout_id, group_id=group.group_id))
    if state.in_flight.splits(group):
        # At the end of the group, only its long members would be left.
        state.expectations.note_prompts([rollout])
    if group.complete and group.evaluation_id is None:
        state.note_lengths(group)
    if group.complete:
        group.complete_at = state.now
    scope = state.caller.reward_scope
    if score is not None:
        # This precedes the reward call, because the reward function may need the episode's results.
        rollout.attach(score)
    if scope == "none" or rollout.reward is not None:
        _score(state, rollout)
    elif scope == "rollout":
        ask_for_reward(state.out, rollout)
    if scope == "group" and group.complete and not group.scored:
        ask_for_rewards(state.out, group)


def ask_for_reward(out: Outbox, rollout: RolloutRecord) -> None:
    """Call the reward function for one rollout."""
    group = rollout.group
    out.tell(facts.RewardRequested(group_id=group.group_id, rollout_id=rollout.rollout_id))
    out.commands.append(do.ScoreRollout(rollout=rollout_of(rollout), prompt=group.prompt))


def ask_for_rewards(out: Outbox, group: GroupRecord) -> None:
    """Call the reward function for a whole group."""
    out.tell(facts.RewardRequested(group_id=group.group_id))
    out.commands.append(do.ScoreGroup(group=group_of(group)))


def on_rewarded(state: SchedulerState, rollout: RolloutRecord, event: ev.Rewarded) -> None:
    rollout.attach(event.score)
    _score(state, rollout)


def on_group_rewarded(state: SchedulerState, group: GroupRecord, event: ev.GroupRewarded) -> None:
    for rollout, score in zip(group.members, event.scores, strict=True):
        if rollout.state is State.SCORING:
            rollout.attach(score)
            _score(state, rollout)


def on_filtered(state: SchedulerState, group: GroupRecord, event: ev.Filtered) -> None:
    state.calls.verdicts.append((group.tokens, event.accepted))
    if event.accepted:
        _accept(state, group)
    else:
        _note_scored(state, group)
        drop(state, group, Reason.REJECTED, "refused by accept")
        count_rejection(state)


def _score(state: SchedulerState, rollout: RolloutRecord) -> None:
    state.in_flight.score(rollout)
    state.out.tell(
        facts.RolloutScored(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group.group_id,
            reward=rollout.reward,
            reward_parts=rollout.reward_parts,
            info=rollout.info,
        )
    )
    if rollout.group.scored and not state.in_flight.splits(rollout.group):
        filter_or_accept(state, rollout.group)


def filter_or_accept(state: SchedulerState, group: GroupRecord) -> None:
    """Call the user's accept function for a scored group, or accept it if there is none."""
    # An evaluation returns every response, so the accept function is not called.
    if state.caller.accepts and group.evaluation_id is None:
        state.out.tell(facts.VerdictRequested(group_id=group.group_id))
        state.out.commands.append(do.Filter(unit=unit_of(group)))
    else:
        _accept(state, group)


def _note_scored(state: SchedulerState, group: GroupRecord) -> None:
    """Record how long it took until a group was accepted or rejected."""
    if group.complete_at is not None and group.evaluation_id is None:
        state.calls.rewards.add(state.now - group.complete_at)


def _accept(state: SchedulerState, group: GroupRecord) -> None:
    _note_scored(state, group)
    if not group.accepted:
        group.accepted = True
        state.in_flight.ready.accept(group)
    state.out.tell(facts.GroupAccepted(group_id=group.group_id))
    state.in_flight.journal.change_group(group)
    state.prompts.consecutive_failures = state.prompts.consecutive_rejections = 0
