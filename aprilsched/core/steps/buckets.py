"""Parking and choosing: the store of open groups behind rounds of like length.

A rollout that is not *due* is parked: its request neither waits to be sent nor is with an engine.
At the stop of a batch everything is called back and parked; at the next begin the chosen groups,
and a few members of others as probes, are made due.
"""

from __future__ import annotations

import numpy as np

from aprilsched.core.policies.rounds import Rounds, rest_of_groups, window
from aprilsched.core.state.lifecycle import GENERATING, State
from aprilsched.core.state.records import GroupRecord, RolloutRecord
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.batch import training_runs

__all__ = ["begin_round", "park_all", "release_all"]


def begin_round(state: SchedulerState) -> None:
    """Choose what runs, when a batch begins, or when all that was chosen has ended."""
    refill = state.plan.schedule.refill
    if not isinstance(refill, Rounds) or not training_runs(state):
        return
    if state.prompts.fetching and not state.prompts.dry:
        return
    if not (state.plan.round_due or _idle(state)):
        return
    # The round is chosen again, and filled, when a source that is dry for now gives more.
    state.plan.round_due = state.prompts.dry and state.in_flight.training < state.plan.target_groups
    groups = [group for group in state.in_flight.training_groups() if not group.complete]
    if groups:
        _choose(state, refill, groups)


def park_all(state: SchedulerState) -> None:
    """The batch is full: nothing is due any more. What is with engines is called back elsewhere."""
    for group in state.in_flight.training_groups():
        for member in group.members:
            if member.due and member.state in GENERATING:
                member.due = False
                state.in_flight.journal.change(member)
                if member.request is not None:
                    state.in_flight.queue.discard(member.request)


def release_all(state: SchedulerState) -> None:
    """No rounds any more: everything is due."""
    for group in state.in_flight.training_groups():
        _release(state, group.members)


def _idle(state: SchedulerState) -> bool:
    in_flight = state.in_flight
    if in_flight.open_attempts or in_flight.queue or not in_flight.generating:
        return False
    members = (member for group in in_flight.training_groups() for member in group.members)
    return not any(member.due and member.state in GENERATING for member in members)


def _choose(state: SchedulerState, refill: Rounds, groups: list[GroupRecord]) -> None:
    batch = state.begun
    running = [i for i, group in enumerate(groups) if _runs(group)]
    count = state.plan.target_groups - state.ready_groups - len(running)
    age = np.array([batch - group.opened for group in groups], dtype=np.int64)
    age[running] = -1
    parked = np.flatnonzero(age >= 0)
    rest = _rest(state, [groups[i] for i in parked])
    chosen = {*running, *parked[window(rest, age[parked], max(1, count))].tolist()}
    for place, group in enumerate(groups):
        first = group.first_run
        if place in chosen or (first is not None and batch - first >= refill.oldest):
            _start(state, group, group.members)
        elif first is None:
            _start(state, group, group.members[: refill.probed(len(group.members))])


def _rest(state: SchedulerState, groups: list[GroupRecord]) -> np.ndarray:
    size = max((len(group.members) for group in groups), default=0)
    tokens = np.zeros((len(groups), size), dtype=np.int64)
    # Places beyond a smaller group's end count as finished members without a length.
    finished = np.ones((len(groups), size), dtype=np.bool_)
    for row, group in enumerate(groups):
        for column, member in enumerate(group.members):
            tokens[row, column] = len(member.log)
            finished[row, column] = member.state not in GENERATING
    return rest_of_groups(tokens, finished, state.expectations.log_law())


def _runs(group: GroupRecord) -> bool:
    """What is on its way back does not: a trainer that takes two batches under one version asks for
    the second one while the probes of the first are called back, and would run all their groups."""
    requests = (m.request for m in group.members if m.state in (State.RUNNING, State.HELD))
    return any(request is not None and not request.aborting for request in requests)


def _start(state: SchedulerState, group: GroupRecord, members: list[RolloutRecord]) -> None:
    if members and group.first_run is None:
        group.first_run = state.begun
        state.in_flight.journal.change_group(group)
    _release(state, members)


def _release(state: SchedulerState, members: list[RolloutRecord]) -> None:
    for member in members:
        if not member.due:
            member.due = True
            state.in_flight.journal.change(member)
            if member.state is State.QUEUED and member.request is not None:
                state.in_flight.queue.add(member.request)
