"""Delivers single samples: each leaves its group as soon as its siblings are known.

The siblings of a sample are the first k *other* members of its group whose generation ended. They
do not depend on the sample's own length or reward, so a baseline of their rewards is independent of
its actions, and the policy gradient stays unbiased. A baseline of "all that are complete now" is
not: a long response sees more siblings than a short one. The order is that of generation, because
the time of a reward may depend on the response.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.records import GroupRecord, RolloutRecord, State
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.steps.scoring import filter_or_accept
from aprilsched.types import Sibling


def settle(state: SchedulerState) -> None:
    """Split off every sample that may be delivered."""
    unsettled = state.in_flight.unsettled
    while unsettled:
        group = unsettled.pop(next(iter(unsettled)))
        if group.dropped is None:
            _settle(state, group)


def _settle(state: SchedulerState, group: GroupRecord) -> None:
    if group.unfinished and len(group.ended) <= (state.in_flight.siblings or 0):
        return  # no member has enough siblings yet
    for rollout in [member for member in group.members if member.state is State.DONE]:
        siblings = _siblings(state, group, rollout)
        if siblings is None:
            continue
        sample = split(state, rollout, siblings)
        state.delivery.must_deliver.note(sample, state.weights.versions.trainer)
        filter_or_accept(state, sample)


def split(
    state: SchedulerState, rollout: RolloutRecord, siblings: tuple[Sibling, ...] = ()
) -> GroupRecord:
    """Split a scored rollout from its group, where it stays among the siblings of others."""
    group_id = rollout.group.group_id
    sample = state.in_flight.split(rollout, siblings)
    known = tuple([each.rollout_id for each in siblings])
    state.out.tell(
        facts.SampleReady(rollout_id=rollout.rollout_id, group_id=group_id, siblings=known)
    )
    return sample


def _siblings(
    state: SchedulerState, group: GroupRecord, rollout: RolloutRecord
) -> tuple[Sibling, ...] | None:
    """Return the siblings of a scored rollout; None if it cannot be delivered yet.

    A group that has lost members may have fewer than configured.
    """
    others = [each for each in group.ended.values() if each.rollout_id != rollout.rollout_id]
    wanted = min(state.in_flight.siblings or 0, len(others) + group.unfinished)
    first = others[:wanted]
    if len(first) < wanted or not all(each.scored for each in first):
        return None
    return tuple([Sibling(rollout_id=e.rollout_id, index=e.index, reward=e.reward) for e in first])
