"""The scheduler: ``handle(event, now)`` gives the commands to carry out.

A handler books what happened; then :data:`DECISIONS` look at the whole state in a fixed order.
Since every decision is made from the state and none from the event, nothing is forgotten when
two things happen at once.

Invariants (:mod:`aprilsched.core.invariants`): every launched rollout is delivered once, in
flight, or in the ledger; groups are never torn; token data of a rollout has one length; no
request is sent to an engine that is paused or has not the trainer's version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aprilsched.core.invariants import check
from aprilsched.core.messages import events
from aprilsched.core.messages.commands import Command
from aprilsched.core.messages.facts import Fact
from aprilsched.core.rules import Rules
from aprilsched.core.state.saved import Saved
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps import (
    batch,
    buckets,
    dispatch,
    engines,
    health,
    launch,
    outage,
    refit,
    replan,
    requests,
    scoring,
    sleep,
    stragglers,
    turns,
    verify,
)
from aprilsched.core.steps.resume import restore

__all__ = ["DECISIONS", "HANDLERS", "Scheduler"]

HANDLERS: dict[type, Callable[[SchedulerState, Any], None]] = {
    events.Opened: engines.on_opened,
    events.BatchRequested: batch.on_batch_requested,
    events.BatchWithdrawn: batch.on_batch_withdrawn,
    events.BatchTaken: batch.on_batch_taken,
    events.BatchesAcknowledged: batch.on_batches_acknowledged,
    events.EvaluationRequested: launch.on_evaluation_requested,
    events.EvaluationWithdrawn: launch.on_evaluation_withdrawn,
    events.UpdateRequested: refit.on_update_requested,
    events.UpdateWithdrawn: refit.on_update_withdrawn,
    events.SleepRequested: sleep.on_sleep_requested,
    events.WakeRequested: sleep.on_wake_requested,
    events.Planned: replan.on_planned,
    events.PromptsArrived: launch.on_prompts_arrived,
    events.Progress: requests.on_progress,
    events.Finished: requests.on_finished,
    events.Interrupted: requests.on_interrupted,
    events.Failed: requests.on_failed,
    events.TurnRequested: turns.on_turn_requested,
    events.TurnWithdrawn: turns.on_turn_withdrawn,
    events.TurnKept: turns.on_turn_kept,
    events.EpisodeFinished: turns.on_episode_finished,
    events.EpisodeFailed: turns.on_episode_failed,
    events.Rewarded: scoring.on_rewarded,
    events.GroupRewarded: scoring.on_group_rewarded,
    events.RewardFailed: scoring.on_reward_failed,
    events.Judged: scoring.on_judged,
    events.Paused: engines.on_paused,
    events.Flushed: engines.on_flushed,
    events.Refitted: refit.on_refitted,
    events.Verified: verify.on_verified,
    events.Released: sleep.on_released,
    events.Woken: sleep.on_woken,
    events.Continued: engines.on_continued,
    events.ControlFailed: engines.on_control_failed,
    events.EngineJoined: engines.on_engine_joined,
    events.EngineLost: engines.on_engine_lost,
    events.Tick: health.on_tick,
}

DECISIONS: tuple[Callable[[SchedulerState], None], ...] = (
    # An evaluation that ends lets an update begin; an update that ends lets a batch go.
    batch.deliver_evaluations,
    refit.advance,
    # After the update has taken its step: an evaluation is begun before an update or after it.
    launch.begin_evaluations,
    sleep.advance,
    batch.offer,
    replan.plan,
    launch.launch,
    buckets.choose_groups,
    stragglers.resolve_stragglers,
    dispatch.interrupt,
    refit.catch_up,
    outage.attend,
    dispatch.steer,
    refit.refit,
    refit.retire,
    dispatch.dispatch,
)


class Scheduler:
    """Decides everything about rollouts; does nothing itself."""

    def __init__(self, rules: Rules) -> None:
        self.state = SchedulerState(rules)

    def handle(self, event: events.Event, now: float) -> list[Command]:
        """Book `event`, which happened at `now` (seconds, any origin), and decide.

        Raises:
            InvariantViolation: if the event is impossible in this state.
        """
        state = self.state
        state.now = now
        state.commands, state.facts = [], []
        HANDLERS[type(event)](state, event)
        if _decides(state, event):
            for decide in DECISIONS:
                decide(state)
        return state.commands

    @property
    def facts(self) -> list[Fact]:
        """What the last event has made true, in order; for listeners."""
        return self.state.facts

    def restore(self, saved: Saved) -> None:
        """Go on where the saved scheduler was; before the first event.

        Raises:
            ConfigError: if it was saved by a scheduler that cannot go on in this one.
        """
        restore(self.state, saved)

    def check_invariants(self) -> None:
        """Raises InvariantViolation if the state is one that must not be."""
        check(self.state)


def _decides(state: SchedulerState, event: events.Event) -> bool:
    if isinstance(event, events.Progress):
        # New tokens change no other decision, but by a label that costs an engine its place; a run
        # has sixteen such events for each rollout.
        return bool(state.stragglers.run_on or state.commands)
    # Nor does time, but by an engine that it shows to be lost, and while there is none.
    return (
        not isinstance(event, events.Tick) or bool(state.commands) or state.fleet.outage is not None
    )
