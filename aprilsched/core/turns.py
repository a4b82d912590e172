"""The turns of a rollout: a plain rollout has one, an episode as many as its coroutine asks for."""

from __future__ import annotations

from aprilsched.core.commands import ResolveTurn
from aprilsched.core.dropping import drop
from aprilsched.core.events import EpisodeFailed, EpisodeFinished, TurnRequested
from aprilsched.core.ledger import Reason
from aprilsched.core.lifecycle import Move
from aprilsched.core.records import RequestRecord
from aprilsched.core.scoring import finish
from aprilsched.core.state import SchedulerState

__all__ = [
    "end_turn",
    "on_episode_failed",
    "on_episode_finished",
    "on_turn_requested",
    "take_back",
]


def end_turn(state: SchedulerState, request: RequestRecord) -> None:
    """A request has run to its end."""
    rollout = request.rollout
    rollout.move(Move.END_TURN)
    rollout.turns += 1
    state.book.forget(request)
    if not state.rules.episodes:
        finish(state, rollout, None)
        return
    ids, logprobs, versions = rollout.log.tail(request.output_start)
    state.commands.append(
        ResolveTurn(
            rollout_id=rollout.rollout_id,
            token_ids=ids,
            logprobs=logprobs,
            versions=versions,
            finish_reason=rollout.finish_reason,
        )
    )


def take_back(state: SchedulerState, request: RequestRecord) -> None:
    """A request came back before its end; what is left of it waits to be sent."""
    if request.rollout.group.dropped is not None:
        state.book.forget(request)
    elif request.remaining <= 0:
        # The abort met the very last token: there is nothing left to ask for.
        request.rollout.finish_reason = "length"
        end_turn(state, request)
    else:
        state.book.requeue(request)


def on_turn_requested(state: SchedulerState, event: TurnRequested) -> None:
    rollout = state.book.rollouts.get(event.rollout_id)
    if rollout is not None:
        state.book.add_request(rollout, event.input_ids, event.sampling or rollout.sampling)


def on_episode_finished(state: SchedulerState, event: EpisodeFinished) -> None:
    rollout = state.book.rollouts.get(event.rollout_id)
    if rollout is None:
        return
    if rollout.turns == 0:
        _fail(state, event.rollout_id, "the episode returned without generating anything")
    else:
        finish(state, rollout, event.reward)


def on_episode_failed(state: SchedulerState, event: EpisodeFailed) -> None:
    _fail(state, event.rollout_id, event.cause)


def _fail(state: SchedulerState, rollout_id: int, cause: str) -> None:
    rollout = state.book.rollouts.get(rollout_id)
    if rollout is not None:
        drop(state, rollout.group, Reason.EPISODE_FAILED, cause, culprit=rollout_id)
