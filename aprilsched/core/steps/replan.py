"""Decides when a new schedule is chosen (automatic over-provisioning), and puts it into force.

The choice takes a simulation, so the shell makes it (:mod:`aprilsched.planning`). The core says
when, and on what evidence. A schedule is asked for after the first batch, and each further time
after three times as many batches, because an estimate improves only with the square root of the
evidence. It is also asked for as soon as lengths have drifted from those that were planned for, and
then on recent evidence only.
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
"""The next schedule is asked for after this many times as many batches as the last one."""
_RECENT_BATCHES = 8
"""Number of batches whose groups are recent evidence."""
_DRIFT = 0.3
"""Relative change of the recent groups' median length that makes a schedule out of date.

With a coefficient of variation of 1, the first responses of eight batches of 32 groups give the
median to 7 %. It is the median because the delivered mean depends on the schedule, and the mean of
the law depends on responses that have not ended."""


def plan(state: SchedulerState) -> None:
    """Ask for a new schedule if there is enough new evidence."""
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
    size = None if state.prompts.sizes_vary else state.config.group_size
    if size is not None:
        # After a resume with larger groups, groups of the earlier size say too little.
        groups = [group for group in groups if len(group.tokens) >= size]
    ended = [group for group in groups if group.complete]
    # A group of which some members have not run does not show what siblings have in common.
    open_groups = [group for group in groups if not group.complete and group.tokens.all()]
    if not ended:
        return
    state.plan.requested = True
    state.plan.planned_at, state.plan.planned_for = batches, _median(groups)
    state.commands.append(
        Plan(
            batch_groups=state.batch_groups,
            group_size=size,
            ended=tuple(ended),
            open=tuple(open_groups),
            prompt_tokens=_prompt_tokens(state),
            engines=len(state.fleet.control.engines),
            kv_tokens=state.fleet.control.kv_tokens,
            current=state.plan.schedule,
        )
    )


def on_planned(state: SchedulerState, event: Planned) -> None:
    """Put the chosen schedule into force; None keeps the present one."""
    state.plan.requested = False
    if event.schedule is None:
        return
    if not event.schedule.refill.defers:
        release_all(state)
    kept = event.schedule.same_as(state.plan.schedule)
    state.plan.schedule = event.schedule
    state.tell(
        ScheduleChanged(
            schedule=event.schedule.why,
            forecast=event.schedule.forecast,
            refill=event.schedule.refill.name,
            kept=kept,
        )
    )
    retarget(state)


def _begun(state: SchedulerState) -> list[GroupLengths]:
    """Lengths of the groups of which a member has begun, in the order of their launch."""
    groups = [group_lengths(group) for group in state.in_flight.training_groups()]
    groups = [*state.expectations.observed.cohort(), *groups]
    return sorted((g for g in groups if g.tokens.any()), key=lambda group: group.launched)


def _median(groups: list[GroupLengths]) -> float | None:
    """The median length of one response of each group. Length buckets run the siblings of some
    groups and not of others, depending on their length."""
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
