"""When a schedule is chosen anew, and how it comes into force.

The choice itself takes a simulation, so it is the shell's (:mod:`aprilsched.planning`); the core
says when, and on what evidence. Asked for after the first batch and then twice as late each time,
since an estimate gets better only with the square root of what was seen; and again as soon as
lengths have drifted from those that were planned for, on recent evidence only.
"""

from __future__ import annotations

from aprilsched.core.commands import Plan
from aprilsched.core.events import Planned
from aprilsched.core.lengths.groups import GroupLengths, group_lengths
from aprilsched.core.policies.over_provision import PoolLoad
from aprilsched.core.state import RECENT_BATCHES, SchedulerState

__all__ = ["on_planned", "plan", "retarget"]

_DRIFT = 0.15
"""Change of the recent batches' mean length that makes a plan out of date. Four batches of 32
groups of 8 with cv 1 and half of the log variance in common scatter by 6 %."""


def plan(state: SchedulerState) -> None:
    """Ask for a schedule if one is due."""
    batches = state.book.counters.batches
    if not state.rules.automatic or state.planning or batches == state.planned_at:
        return
    drifted = _drifted(state)
    if batches < 2 * state.planned_at and not drifted:
        return
    open_groups = [group_lengths(group) for group in state.book.training_groups()]
    ended = state.expectations.observed.cohort()
    if drifted:
        recent = RECENT_BATCHES * state.rules.batch_groups
        ended, open_groups = _newest(ended, recent), _newest(open_groups, recent)
    if not ended:
        return
    state.planning = True
    state.planned_at, state.planned_mean = batches, _recent_mean(state)
    state.commands.append(
        Plan(
            ended=tuple(ended),
            open=tuple(open_groups),
            prompt_tokens=_prompt_tokens(state),
            engines=len(state.control.engines),
            kv_tokens=state.control.kv_tokens,
            current=state.schedule,
        )
    )


def on_planned(state: SchedulerState, event: Planned) -> None:
    """The shell has chosen; None keeps what is in force."""
    state.planning = False
    if event.schedule is not None:
        state.schedule = event.schedule
        retarget(state)


def retarget(state: SchedulerState) -> None:
    """Decide how many groups the next batch keeps open."""
    book, capacity = state.book, state.control.kv_tokens
    state.target_groups = state.schedule.over_provision.target_groups(
        PoolLoad(
            batch_groups=state.rules.batch_groups,
            current=state.target_groups,
            kv_share=None if capacity is None else book.peak_tokens / capacity,
        )
    )
    book.peak_tokens = book.held_tokens


def _newest(groups: list[GroupLengths], count: int) -> list[GroupLengths]:
    return sorted(groups, key=lambda group: group.launched)[-count:]


def _drifted(state: SchedulerState) -> bool:
    if len(state.delivered) < RECENT_BATCHES or not state.planned_mean:
        return False
    return abs(_recent_mean(state) / state.planned_mean - 1) > _DRIFT


def _recent_mean(state: SchedulerState) -> float:
    responses = sum(count for count, _ in state.delivered)
    return sum(tokens for _, tokens in state.delivered) / responses if responses else 0.0


def _prompt_tokens(state: SchedulerState) -> float:
    rollouts = state.book.rollouts.values()
    return sum(len(r.prompt_ids) for r in rollouts) / len(rollouts) if rollouts else 0.0
