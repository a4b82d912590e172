"""When a schedule is chosen anew, and how it comes into force.

The choice itself takes a simulation, so it is the shell's (:mod:`aprilsched.planning`); the core
says when, and on what evidence. Asked for after the first batch and then three times as late each
time, since an estimate gets better only with the square root of what was seen; and again as soon
as lengths have drifted from those that were planned for, on recent evidence only.
"""

from __future__ import annotations

import numpy as np

from aprilsched.core.lengths.groups import GroupLengths
from aprilsched.core.lengths.kaplan_meier import kaplan_meier
from aprilsched.core.messages.commands import Plan
from aprilsched.core.messages.events import Planned
from aprilsched.core.messages.facts import ScheduleChanged
from aprilsched.core.state.records import group_lengths
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.buckets import release_all
from aprilsched.core.steps.target import retarget

__all__ = ["on_planned", "plan"]

_LATER = 3
_RECENT_BATCHES = 8
_DRIFT = 0.3
"""Change of the recent groups' median length that makes a plan out of date. With cv 1 the first
responses of eight batches of 32 groups know it to 7 %. The median, because the delivered mean
depends on the schedule, and the mean of the law on responses still to end."""


def plan(state: SchedulerState) -> None:
    """Ask for a schedule if one is due."""
    batches = state.in_flight.counters.batches
    if not state.config.automatic or state.plan.requested or batches == state.plan.checked_at:
        return
    if not state.fleet.control.engines:
        return
    state.plan.checked_at = batches
    if state.start_up.lasts(batches):
        return
    groups = _begun(state)
    recent = groups[-_RECENT_BATCHES * state.batch_groups :]
    drifted = batches >= state.plan.planned_at + _RECENT_BATCHES and _drifted(state, recent)
    if batches < _LATER * state.plan.planned_at and not drifted:
        return
    if drifted:
        groups = recent
    # A run that was resumed with larger groups knows nothing yet of what is left of them.
    groups = [group for group in groups if len(group.tokens) >= state.config.group_size]
    ended = [group for group in groups if group.complete]
    # Of a deferred group nothing is known that its siblings have in common.
    open_groups = [group for group in groups if not group.complete and group.tokens.all()]
    if not ended:
        return
    state.plan.requested = True
    state.plan.planned_at, state.plan.planned_for = batches, _median(groups)
    state.commands.append(
        Plan(
            batch_groups=state.batch_groups,
            ended=tuple(ended),
            open=tuple(open_groups),
            prompt_tokens=_prompt_tokens(state),
            engines=len(state.fleet.control.engines),
            kv_tokens=state.fleet.control.kv_tokens,
            current=state.plan.schedule,
        )
    )


def on_planned(state: SchedulerState, event: Planned) -> None:
    """The shell has chosen; None keeps what is in force."""
    state.plan.requested = False
    if event.schedule is None:
        return
    if not event.schedule.refill.defers:
        release_all(state)
    state.plan.schedule = event.schedule
    state.tell(ScheduleChanged(schedule=event.schedule.why))
    retarget(state)


def _begun(state: SchedulerState) -> list[GroupLengths]:
    """Groups of which some member has begun, in the order of launching."""
    groups = [group_lengths(group) for group in state.in_flight.training_groups()]
    groups = [*state.expectations.observed.cohort(), *groups]
    return sorted((g for g in groups if g.tokens.any()), key=lambda group: group.launched)


def _median(groups: list[GroupLengths]) -> float | None:
    """Of one response of each group: length buckets run the siblings of some groups and not of
    others, by their length."""
    tokens = np.array([group.tokens[0] for group in groups], dtype=np.int64)
    finished = np.array([group.finished[0] for group in groups], dtype=np.bool_)
    if not finished.any():
        return None
    return float(kaplan_meier(tokens, ~finished).quantile(0.5))


def _drifted(state: SchedulerState, recent: list[GroupLengths]) -> bool:
    typical = _median(recent)
    if typical is None or state.plan.planned_for is None:
        return False
    ratio = typical / state.plan.planned_for
    return max(ratio, 1 / ratio) > 1 + _DRIFT


def _prompt_tokens(state: SchedulerState) -> float:
    rollouts = state.in_flight.rollouts.values()
    return sum(len(r.prompt_ids) for r in rollouts) / len(rollouts) if rollouts else 0.0
