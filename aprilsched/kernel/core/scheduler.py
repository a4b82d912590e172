"""The scheduler: ``handle(event, now)`` takes one event and returns the commands to carry out.

A handler records the event in the state. Then each of the :data:`DECISIONS` looks at the whole
state, in a fixed order. Decisions depend on the state alone, never on the event, so nothing is lost
if two things happen at the same time.

:mod:`aprilsched.kernel.core.invariants` checks the state after every event: every launched rollout
is delivered once, in flight, or in the ledger; groups leave as a whole; ids, log-probabilities and
versions of a rollout have one length; an engine out of use has no open attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from aprilsched.kernel.core.config import Caller, SchedulerConfig
from aprilsched.kernel.core.invariants import check
from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.records import GroupRecord, RequestRecord, RolloutRecord
from aprilsched.kernel.core.state.saved import Saved
from aprilsched.kernel.core.state.state import SchedulerState
from aprilsched.kernel.core.state.weights import UpdateKind, UpdatePhase
from aprilsched.kernel.core.steps import (
    batch,
    drop,
    engines,
    follow,
    health,
    launch,
    members,
    migration,
    outage,
    placement,
    refit,
    replan,
    requests,
    rolling,
    samples,
    scoring,
    sessions,
    sleep,
    steering,
    stragglers,
    turns,
    wrong_versions,
)
from aprilsched.kernel.core.steps.resume import restore

T = TypeVar("T")


def _rollout(state: SchedulerState, event: Any) -> RolloutRecord | None:
    return state.in_flight.rollouts.get(event.rollout_id)


def _group(state: SchedulerState, event: Any) -> GroupRecord | None:
    return state.in_flight.groups.get(event.group_id)


def _attempt(state: SchedulerState, event: Any) -> RequestRecord | None:
    return state.in_flight.attempt(event.request_id, event.attempt)


def _of(
    find: Callable[[SchedulerState, Any], T | None],
    handle: Callable[[SchedulerState, T, Any], None],
) -> Callable[[SchedulerState, Any], None]:
    """Return a handler that ignores events about a subject which `find` no longer finds.

    A late event about a dropped group is an example.
    """

    def handle_if_there(state: SchedulerState, event: Any) -> None:
        subject = find(state, event)
        if subject is not None:
            handle(state, subject, event)

    return handle_if_there


HANDLERS: dict[type, Callable[[SchedulerState, Any], None]] = {
    # The trainer: batches, evaluations, updates, sleep.
    ev.Opened: engines.on_opened,
    ev.BatchRequested: batch.on_batch_requested,
    ev.BatchWithdrawn: batch.on_batch_withdrawn,
    ev.BatchTaken: batch.on_batch_taken,
    ev.BatchesAcknowledged: batch.on_batches_acknowledged,
    ev.TrainerReturned: batch.on_trainer_returned,
    ev.LogprobsReported: batch.on_logprobs_reported,
    ev.EvaluationRequested: launch.on_evaluation_requested,
    ev.EvaluationWithdrawn: launch.on_evaluation_withdrawn,
    ev.UpdateRequested: refit.on_update_requested,
    ev.UpdateWithdrawn: refit.on_update_withdrawn,
    ev.PartsFollow: refit.on_parts_follow,
    ev.SleepRequested: sleep.on_sleep_requested,
    ev.WakeRequested: sleep.on_wake_requested,
    ev.HoldChanged: engines.on_hold_changed,
    ev.GroupWithdrawn: _of(_group, drop.on_group_withdrawn),
    # The schedule and the prompts that new groups are made of.
    ev.Planned: replan.on_planned,
    ev.PromptsArrived: launch.on_prompts_arrived,
    # Requests.
    ev.Progress: _of(_attempt, requests.on_progress),
    ev.Finished: _of(_attempt, requests.on_finished),
    ev.Interrupted: _of(_attempt, requests.on_interrupted),
    ev.Failed: _of(_attempt, requests.on_failed),
    # Episodes, rewards and the user's filter.
    ev.TurnRequested: _of(_rollout, turns.on_turn_requested),
    ev.TurnWithdrawn: _of(_rollout, turns.on_turn_withdrawn),
    ev.TurnKept: _of(_rollout, turns.on_turn_kept),
    ev.EpisodeWaits: _of(_rollout, turns.on_episode_waits),
    ev.EpisodeFinished: _of(_rollout, turns.on_episode_finished),
    ev.EpisodeFailed: _of(_rollout, members.on_episode_failed),
    ev.TeardownFailed: members.on_teardown_failed,
    ev.Rewarded: _of(_rollout, scoring.on_rewarded),
    ev.GroupRewarded: _of(_group, scoring.on_group_rewarded),
    ev.RewardFailed: _of(_group, members.on_reward_failed),
    ev.Filtered: _of(_group, scoring.on_filtered),
    # Answers of engines to control calls.
    ev.Paused: engines.on_paused,
    ev.Flushed: engines.on_flushed,
    ev.Refitted: refit.on_refitted,
    ev.Verified: wrong_versions.on_verified,
    ev.LoadSeen: sessions.on_load_seen,
    ev.VersionSeen: follow.on_version_seen,
    ev.Released: sleep.on_released,
    ev.Woken: sleep.on_woken,
    ev.Continued: engines.on_continued,
    ev.ControlFailed: engines.on_control_failed,
    # The fleet and the clock.
    ev.EngineJoined: engines.on_engine_joined,
    ev.EngineLost: engines.on_engine_lost,
    ev.Tick: health.on_tick,
}

DECISIONS: tuple[Callable[[SchedulerState], None], ...] = (
    # The order matters because decisions run only on an event, and the last answer of a fleet may
    # be the last event. So a later decision must see what an earlier one makes possible in the same
    # event; otherwise the run would idle forever.
    #
    # First of all, because every later decision counts the samples that may be delivered.
    samples.settle,
    # Before the next ones, because an update and a sleep wait for running evaluations: an
    # evaluation that ends now must no longer block them.
    batch.deliver_evaluations,
    # Before the next four, because an update that ends now lets evaluations start, a sleep end and
    # a batch be offered, and after an adapter update no answer of an engine follows.
    refit.advance,
    # After the step of the update, so that an evaluation is generated entirely before an update or
    # entirely after it.
    launch.begin_evaluations,
    # After the update, because engines wake only when the update that brings their weights has
    # ended. Before `steering.steer`, because the goal of the engines follows from the phase of the
    # sleep.
    sleep.advance_sleep,
    # Before `launch.launch`, because an offer ends the batch in work, and the number of groups to
    # launch then depends on the next batch.
    batch.offer,
    # After the step of the update and the offer, because the trainer does not train while it waits
    # for them. Before `replan.plan`, which passes the times on.
    replan.measure,
    # Anywhere: it only requests a schedule from the shell, and the answer is an event.
    replan.plan,
    # Before `stragglers.choose_groups`, which chooses among the open groups, new ones included.
    launch.launch,
    # Before `placement.place`, because only chosen groups wait to be sent. It acts while
    # training rollouts run and `stragglers.defer_stragglers` when they stop, so the order of
    # these two does not matter.
    stragglers.choose_groups,
    # Before `placement.place`, which sends each moved request to its new engine.
    migration.migrate,
    # Before `steering.steer`, which pauses no engine while a straggler is being aborted: a request
    # aborted after a retract returns without the tokens that are not streamed yet (hazard 1).
    stragglers.defer_stragglers,
    # Before `steering.steer`, so that requests inside a paused engine are aborted before it
    # continues. Before or after `stragglers.defer_stragglers`, because no request is aborted twice.
    steering.interrupt,
    # After `launch.launch`, because an engine is freed if requests of the newest version wait for
    # one. Before `refit.catch_up`, which refits the free engines.
    rolling.roll,
    # Before `outage.attend`, which would otherwise ask the trainer for a new version although an
    # engine on standby can load the current one; and before `steering.steer`, which gives the
    # engine its first control call.
    refit.catch_up,
    # Anywhere after `refit.catch_up`: while no engine is in use every tick runs all decisions, so
    # they see an evaluation abandoned here at most a second later.
    outage.attend,
    # Before `refit.refit`, because memory that a refit needs is reclaimed first. The order with
    # respect to `placement.place` does not matter: both follow the same goal, and requests are sent
    # only while the goal is to run (hazard 4).
    steering.steer,
    # After `steering.steer`, which pauses and flushes the engines; nothing later depends on it.
    refit.refit,
    # Anywhere: an adapter is unloaded only when no request is sent with it any longer.
    refit.retire,
    # Last, because it sends the requests that the other decisions leave waiting.
    placement.place,
)


class Scheduler:
    """Makes every decision about rollouts, and executes none itself."""

    def __init__(self, config: SchedulerConfig, caller: Caller | None = None) -> None:
        self.state = SchedulerState(config, caller)

    def handle(self, event: ev.Event, now: float) -> list[do.Command]:
        """Handle `event` at time `now` (seconds, any origin) and return the commands.

        Raises:
            InvariantViolation: if the event is impossible in this state.
        """
        state = self.state
        state.now = now
        out = state.out
        out.commands, out.facts = [], []
        HANDLERS[type(event)](state, event)
        if _decides(state, event):
            for decide in DECISIONS:
                decide(state)
        return out.commands

    @property
    def facts(self) -> list[facts.Fact]:
        """The facts of the last event, in order, for listeners."""
        return self.state.out.facts

    def restore(self, saved: Saved) -> None:
        """Continue from a saved scheduler. It must be called before the first event.

        Raises:
            ConfigError: if the saved run cannot continue under the settings of this scheduler.
        """
        restore(self.state, saved)

    def check_invariants(self) -> None:
        """Raise InvariantViolation if an invariant of the state does not hold."""
        check(self.state)


def _decides(state: SchedulerState, event: ev.Event) -> bool:
    """Return whether the event can change a decision; most events of a run cannot."""
    kind = event.__class__
    if kind is ev.Progress:
        # A label that removes an engine from use emits a command, and so does one that starts an
        # update. A run has sixteen Progress events per rollout, so the others are skipped.
        if state.out.commands or state.fleet.crowded_engines:
            return True
        update = state.weights.update
        return (
            update is not None
            and update.kind is UpdateKind.FOLLOWED
            and update.phase is UpdatePhase.PREPARING
        )
    if kind is ev.VersionSeen:
        return bool(state.out.facts)
    if kind is ev.LoadSeen:
        # A report may show room for a turn that waits.
        return bool(
            state.fleet.crowded_engines or (state.limits_sessions and state.in_flight.queue)
        )
    # A tick matters if it shows that an engine is lost, during an outage, and if it may end the
    # backoff of a busy engine.
    fleet = state.fleet
    return kind is not ev.Tick or bool(state.out.commands or fleet.admissions or fleet.outage)
