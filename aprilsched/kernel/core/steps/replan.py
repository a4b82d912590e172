"""Decides when to choose a new schedule (automatic scheduling), and puts it into force.

The choice takes a simulation, so the shell makes it (:mod:`aprilsched.planning`). The core decides
when, and on what evidence. It requests a schedule after the first batch, and then each time the
number of batches has tripled, because an estimate improves only with the square root of the
evidence. It also requests one as soon as the lengths have drifted from the planned ones, and then
on recent evidence only.

A schedule may name another pace (``pace="auto"``). It takes effect in the event that brings it,
whatever the engines do: the goal of the engines, the launch of groups and the stop of a batch are
decided from the state in each event, and every decision of one pace leaves a state from which the
other pace can continue. Only the start of a wave is a separate event: on the asynchronous pace a
batch starts when the previous one is offered, on the synchronous pace when it is requested.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from aprilsched.kernel.core.lengths.distributions import kaplan_meier
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.policies.schedule import Pace, Schedule
from aprilsched.kernel.core.state.caller_functions import CallerTimes
from aprilsched.kernel.core.state.records import group_lengths
from aprilsched.kernel.core.state.state import Outbox, Plan, SchedulerState
from aprilsched.kernel.core.state.weights import UpdateKind
from aprilsched.kernel.core.steps.stragglers import release_all
from aprilsched.kernel.core.steps.target import retarget
from aprilsched.kernel.values.capabilities import Reservation

_LATER = 3
"""Factor by which the number of batches grows between two requests for a schedule."""
_RECENT_BATCHES = 8
"""Number of batches whose groups count as recent evidence."""
_DRIFT = 0.3
"""Relative change of the recent groups' median length that makes a schedule out of date.

With a coefficient of variation of 1, the first responses of eight batches of 32 groups yield the
median to 7 %. The delivered mean would not do, because it depends on the schedule; nor would the
mean of the distribution, which depends on unfinished responses."""

_DRIFT_TRAINING = 1 / 3
"""Relative change of the trainer's time that makes a schedule out of date."""
_LEAST_OF_STEP = 0.05
"""Share of a whole step; a smaller change of the trainer's time changes no schedule."""


def measure(state: SchedulerState) -> None:
    """Note whether the trainer trains, to measure its times."""
    times, delivery = state.times, state.delivery
    if times.trained is None:
        return
    update, sleep = state.weights.update, state.fleet.sleep
    trains = not (
        delivery.trainer_waits
        or (update is not None and update.kind is not UpdateKind.FOLLOWED)
        or state.evaluations.running
        or state.evaluations.waiting
        or state.fleet.paused_by_trainer
        or (sleep is not None and (sleep.waking or not sleep.asleep))
    )
    times.follow(trains=trains, now=state.now)
    if delivery.trainer_waits and not delivery.work.taken:
        times.end(state.now)


def plan(state: SchedulerState) -> None:
    """Request a new schedule if there is enough new evidence."""
    batches = state.in_flight.counters.batches
    if not state.config.automatic or state.plan.requested or batches == state.plan.checked_at_batch:
        return
    prompt_tokens, control = state.expectations.prompt_tokens, state.fleet.control
    if not control.engines or prompt_tokens is None:
        return
    state.plan.checked_at_batch = batches
    groups = _begun(state)
    recent = groups[-_RECENT_BATCHES * state.batch_groups :]
    drifted = batches >= state.plan.planned_at + _RECENT_BATCHES and _drifted(state.plan, recent)
    training = state.times.training.mean
    if (
        batches < _LATER * state.plan.planned_at
        and not drifted
        and not _takes_otherwise(state, training)
    ):
        return
    if drifted:
        groups = recent
    size = None if state.prompts.sizes_vary else state.config.group_size
    if size is not None:
        # After a resume with larger groups, the previous, smaller groups are weak evidence.
        groups = [group for group in groups if len(group.tokens) >= size]
    ended = [group for group in groups if group.complete]
    # Without the groups deferred after their probe, only those that a rule runs first would be
    # known, and these are the short ones. A discarded probe adds nothing to the evidence of the
    # group that replaces it.
    running = {group_lengths(group).launched for group in state.in_flight.training_groups()}
    open_groups = [
        group
        for group in groups
        if not group.complete and (group.tokens.all() or group.launched in running)
    ]
    if not ended:
        return
    state.plan.requested = True
    state.plan.planned_at, state.plan.planned_for = batches, _median(groups)
    state.plan.planned_training = training
    state.plan.planned_times = _other_times(state.calls)
    state.out.commands.append(
        do.Plan(
            batch_groups=state.batch_groups,
            group_size=size,
            ended=tuple(ended),
            open=tuple(open_groups),
            prompt_tokens=prompt_tokens,
            spare_tokens=state.expectations.spare_tokens,
            reservation=_reservation(state),
            engines=len(control.engines),
            kv_tokens=control.kv_tokens,
            current=state.plan.schedule,
            paces=_paces(state),
            places=_places(state),
            train_seconds=training,
            train_spread=state.times.training.spread,
            refit_seconds=state.times.refits.mean,
            most_tokens=state.expectations.limit,
            remembered=state.expectations.explained(list(state.in_flight.training_groups())),
            reward_seconds=state.calls.reward_seconds,
            accepted=state.calls.accepted,
            gaps=state.calls.gaps_of_response,
            gap_seconds=state.calls.gaps.parts,
            end_seconds=state.calls.ends.parts,
        )
    )


def _reservation(state: SchedulerState) -> Reservation | None:
    reservation = state.fleet.control.reservation
    if reservation is None or state.expectations.ignores_ends:
        return reservation
    return replace(reservation, fixed_in_full=False)


def on_planned(state: SchedulerState, event: ev.Planned) -> None:
    """Put the chosen schedule into force; None keeps the current one."""
    state.plan.requested = False
    if event.schedule is None:
        return
    schedule = fitting(state, event.schedule)
    if isinstance(schedule, str):
        state.out.tell(facts.ScheduleRefused(schedule=event.schedule.why, cause=schedule))
        return
    _put_into_force(state, schedule)


def fitting(state: SchedulerState, schedule: Schedule) -> Schedule | str:
    """Return the schedule with its pace in this run, or why it cannot be in force."""
    config, refill = state.config, schedule.refill
    if config.pace == "auto":
        # A planner without knowledge of paces keeps the current one.
        schedule = replace(schedule, pace=schedule.pace or state.plan.schedule.pace)
    elif schedule.pace not in (None, config.pace):
        return f"its pace is {schedule.pace}, and the configured one is {config.pace}"
    if schedule.placement not in (None, config.dispatch.placement) and not _places(state):
        return (
            f"its placement is {schedule.placement}, and the configured one is "
            f"{config.dispatch.placement}, or episodes, affinities or rolling refits need their own"
        )
    asynchronous = (schedule.pace or config.pace) == "asynchronous"
    if asynchronous and state.fleet.memory_lent_to_trainer:
        return "its pace is asynchronous, and the engines lend their memory to the trainer"
    if state.staleness.rule == "restart" and (asynchronous or not config.settles(schedule)):
        return (
            'max_staleness.rule is "restart", and under this schedule a prompt of long responses '
            "may restart forever"
        )
    if refill.defers and (asynchronous or not config.may_defer):
        pace = "asynchronous" if asynchronous else "synchronous"
        return (
            f'refill="{refill.name}" defers groups, which pace="{pace}" with '
            f'straggler="{config.straggler_name}" and these settings cannot'
        )
    return schedule


def stay_synchronous(state: SchedulerState) -> None:
    """Keep the pace synchronous from now on, if the pace is chosen during the run.

    Otherwise a trainer that borrows the engines' memory would wait for engines that generate.
    """
    state.fleet.memory_lent_to_trainer = True
    if state.config.pace == "auto" and state.asynchronous:
        why = "synchronous from now on: the engines lend their memory to the trainer"
        _put_into_force(state, replace(state.plan.schedule, pace="synchronous", why=why))


def _put_into_force(state: SchedulerState, schedule: Schedule) -> None:
    if not schedule.refill.defers:
        release_all(state.in_flight)
    kept = schedule.same_as(state.plan.schedule)
    waited = not state.asynchronous
    state.plan.schedule = schedule
    if waited and state.asynchronous and not state.delivery.collecting:
        # The batch in work started with the offer of the previous one. On the synchronous pace it
        # would start with the trainer's request.
        state.plan.wave_due = True
    tell_schedule(state.plan, state.out, kept=kept)
    retarget(state)


def tell_schedule(plan: Plan, out: Outbox, *, kept: bool) -> None:
    """Report the schedule in force to listeners, and whether it is unchanged."""
    schedule = plan.schedule
    out.tell(
        facts.ScheduleChanged(
            schedule=schedule.why,
            forecast=schedule.forecast,
            refill=schedule.refill.name,
            kept=kept,
            pace=schedule.pace,
        )
    )


def _paces(state: SchedulerState) -> tuple[Pace, ...]:
    """Return the paces that a schedule may name.

    As long as nothing is known of the trainer, assume that it trains: generating during that time
    costs little if it does not, while waiting for it made the first ten batches 4 to 9 % longer if
    it does.
    """
    if state.config.pace != "auto":
        return ()
    if state.fleet.memory_lent_to_trainer:
        return ("synchronous",)
    if state.times.training.mean is None and state.staleness.bound != 0:
        return ("asynchronous",)
    return ("synchronous", "asynchronous")


def _places(state: SchedulerState) -> bool:
    """Return whether a schedule may name the placement.

    The contexts of earlier turns, and of prompts with one affinity, are on one engine, and with
    rolling refits only some engines take new groups.
    """
    dispatch, caller = state.config.dispatch, state.caller
    kept = caller.episodes or state.in_flight.affinity_engines or state.rolling or dispatch.migrate
    return dispatch.placement == "auto" and not kept


def _begun(state: SchedulerState) -> list[GroupLengths]:
    """Return the lengths of the groups with a started member, in the order of their launch."""
    # A complete group is among the observed ones, and a single sample is a part of its group.
    in_flight = (group for group in state.in_flight.training_groups() if not group.complete)
    groups = [*state.expectations.observed.cohort(), *map(group_lengths, in_flight)]
    return sorted((g for g in groups if g.tokens.any()), key=lambda group: group.launched)


def _median(groups: list[GroupLengths]) -> float | None:
    """Return the median length of one response per group.

    Length buckets run the siblings of some groups and not of others, depending on their length, so
    all responses together would be biased.
    """
    tokens = np.array([group.tokens[0] for group in groups], dtype=np.int64)
    finished = np.array([group.finished[0] for group in groups], dtype=np.bool_)
    if not finished.any():
        return None
    return float(kaplan_meier(tokens, ~finished).quantile(0.5))


def _drifted(plan: Plan, recent: list[GroupLengths]) -> bool:
    typical = _median(recent)
    if typical is None or plan.planned_for is None:
        return False
    ratio = typical / plan.planned_for
    return max(ratio, 1 / ratio) > 1 + _DRIFT


def _other_times(calls: CallerTimes) -> tuple[float, float]:
    """Return the reward time of a response, and its time in gaps between turns, in seconds."""
    # Keep values far above the median: the times of tools have heavy tails.
    rewards, gap, end = (
        float(np.mean(times.last)) if times.last else 0.0
        for times in (calls.rewards, calls.gaps, calls.ends)
    )
    return rewards, calls.gaps_of_response * gap + end


def _takes_otherwise(state: SchedulerState, training: float | None) -> bool:
    """Return whether the trainer, rewards or tools take another time than planned.

    Then another pace or another ratio may be the best.
    """
    if training is None:
        return False
    now = [*_other_times(state.calls)]
    planned_for = [*state.plan.planned_times]
    if state.config.pace == "auto" and not state.fleet.memory_lent_to_trainer:
        if state.plan.planned_training is None:
            return True
        now.append(training)
        planned_for.append(state.plan.planned_training)
    if state.in_flight.counters.batches < state.plan.planned_at + _RECENT_BATCHES:
        return False
    least = _LEAST_OF_STEP * (state.times.steps.mean or 0.0)
    return any(
        abs(seconds - before) > max(_DRIFT_TRAINING * before, least)
        for seconds, before in zip(now, planned_for, strict=True)
    )
