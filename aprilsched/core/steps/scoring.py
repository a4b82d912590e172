"""Takes rollouts from generated to accepted: rewards, and the user's accept function."""

from __future__ import annotations

from aprilsched.core.messages.commands import Filter, ScoreGroup, ScoreRollout
from aprilsched.core.messages.events import Filtered, GroupRewarded, Rewarded, RewardFailed
from aprilsched.core.messages.facts import (
    GroupAccepted,
    RewardRequested,
    RolloutFinished,
    RolloutScored,
    VerdictRequested,
)
from aprilsched.core.state.assembly import group_of, rollout_of
from aprilsched.core.state.ledger import Reason
from aprilsched.core.state.lifecycle import Move, State
from aprilsched.core.state.records import GroupRecord, RolloutRecord
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.drop import drop
from aprilsched.types import Score

__all__ = [
    "filter_or_accept",
    "finish",
    "on_filtered",
    "on_group_rewarded",
    "on_reward_failed",
    "on_rewarded",
]


def finish(state: SchedulerState, rollout: RolloutRecord, score: Score | None) -> None:
    """Finish a rollout that is generated to its end; `score` is its episode's, if it has one."""
    group = rollout.group
    if group.racing:
        # Its place in what is delivered, before a reward function can see it.
        rollout.index = len(group.members) - group.unfinished
    state.in_flight.finish(rollout)
    state.tell(RolloutFinished(rollout_id=rollout.rollout_id, group_id=group.group_id))
    if group.racing and len(group.members) - group.unfinished == group.size:
        _end_race(state, group)
    elif group.complete and group.evaluation_id is None:
        state.note_lengths(group)
    scope = state.caller.reward_scope
    if score is not None:
        # Before the reward function is asked: it may need what the episode tells.
        rollout.attach(score)
    if scope == "none" or rollout.reward is not None:
        _score(state, rollout)
    elif scope == "rollout":
        state.tell(RewardRequested(group_id=group.group_id, rollout_id=rollout.rollout_id))
        state.commands.append(ScoreRollout(rollout=rollout_of(rollout), prompt=group.prompt))
    if scope == "group" and group.complete and group.unscored:
        state.tell(RewardRequested(group_id=group.group_id))
        state.commands.append(ScoreGroup(group=group_of(group)))


def _end_race(state: SchedulerState, group: GroupRecord) -> None:
    """Throw away the members that are not complete, because enough of them are."""
    # The lengths of all members together, where those of the losers are censored: the delivered
    # ones alone would be taken for a law of shorter responses.
    state.note_lengths(group)
    losers = state.in_flight.end_race(group)
    drop(state, losers, Reason.OUTRACED, "enough other responses of its prompt were complete")


def on_rewarded(state: SchedulerState, event: Rewarded) -> None:
    rollout = state.in_flight.rollouts.get(event.rollout_id)
    if rollout is not None:
        rollout.attach(event.score)
        _score(state, rollout)


def on_group_rewarded(state: SchedulerState, event: GroupRewarded) -> None:
    group = state.in_flight.groups.get(event.group_id)
    if group is None:
        return
    for rollout, score in zip(group.members, event.scores, strict=True):
        if rollout.state is State.SCORING:
            rollout.attach(score)
            _score(state, rollout)


def on_reward_failed(state: SchedulerState, event: RewardFailed) -> None:
    group = state.in_flight.groups.get(event.group_id)
    if group is not None:
        drop(state, group, Reason.REWARD_FAILED, event.cause)


def on_filtered(state: SchedulerState, event: Filtered) -> None:
    group = state.in_flight.groups.get(event.group_id)
    if group is None:
        return
    if event.accepted:
        _accept(state, group)
    else:
        drop(state, group, Reason.REJECTED, "refused by accept")


def _score(state: SchedulerState, rollout: RolloutRecord) -> None:
    rollout.move(Move.SCORE)
    state.in_flight.journal.finish(rollout)
    state.tell(
        RolloutScored(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group.group_id,
            reward=rollout.reward,
            reward_parts=rollout.reward_parts,
            info=rollout.info,
        )
    )
    rollout.group.unscored -= 1
    if not rollout.group.unscored:
        filter_or_accept(state, rollout.group)


def filter_or_accept(state: SchedulerState, group: GroupRecord) -> None:
    """Ask the user's accept function about a group that is scored, or accept it if there is
    none."""
    # An evaluation returns every response, so the accept function is not asked.
    if state.caller.accepts and group.evaluation_id is None:
        state.tell(VerdictRequested(group_id=group.group_id))
        state.commands.append(Filter(group=group_of(group)))
    else:
        _accept(state, group)


def _accept(state: SchedulerState, group: GroupRecord) -> None:
    if not group.accepted:
        group.accepted = True
        state.in_flight.ready.accept(group)
    state.tell(GroupAccepted(group_id=group.group_id))
    state.in_flight.journal.change_group(group)
    state.prompts.consecutive_failures = 0
