"""The turns of a rollout: a plain rollout has one, an episode as many as its coroutine asks for."""

from __future__ import annotations

from aprilsched.core.commands import ResolveTurn
from aprilsched.core.dropping import drop
from aprilsched.core.events import EpisodeFailed, EpisodeFinished, TurnRequested
from aprilsched.core.ledger import Reason
from aprilsched.core.lifecycle import Move
from aprilsched.core.records import RequestRecord, RolloutRecord
from aprilsched.core.saving.replaying import AnsweredTurn, ask_again, forget_rest
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
    rollout.answered.append((request.output_start, len(rollout.log), rollout.finish_reason))
    _answer(state, rollout, rollout.turns - 1)


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
    if rollout is None:
        return
    known = ask_again(state, rollout, event.input_ids)
    if isinstance(known, AnsweredTurn):
        rollout.turns += 1
        _answer(state, rollout, known.turn)
        return
    state.book.add_request(
        rollout,
        event.input_ids,
        event.sampling or rollout.sampling,
        output_start=None if known is None else known.begin,
    )


def on_episode_finished(state: SchedulerState, event: EpisodeFinished) -> None:
    rollout = state.book.rollouts.get(event.rollout_id)
    if rollout is None:
        return
    if rollout.turns == 0:
        _fail(state, event.rollout_id, "the episode returned without generating anything")
    else:
        if rollout.replay is not None:
            forget_rest(state, rollout)
        finish(state, rollout, event.reward)


def on_episode_failed(state: SchedulerState, event: EpisodeFailed) -> None:
    _fail(state, event.rollout_id, event.cause)


def _answer(state: SchedulerState, rollout: RolloutRecord, turn: int) -> None:
    begin, end, reason = rollout.answered[turn]
    ids, logprobs, versions = rollout.log.tail(begin)
    size = end - begin
    state.commands.append(
        ResolveTurn(
            rollout_id=rollout.rollout_id,
            token_ids=ids[:size],
            logprobs=logprobs[:size],
            versions=versions[:size],
            finish_reason=reason,
        )
    )


def _fail(state: SchedulerState, rollout_id: int, cause: str) -> None:
    rollout = state.book.rollouts.get(rollout_id)
    if rollout is not None:
        drop(state, rollout.group, Reason.EPISODE_FAILED, cause, culprit=rollout_id)
