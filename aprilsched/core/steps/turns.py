"""Handles the turns of rollouts: a plain rollout has one, an episode as many as it asks for.

An episode may withdraw a turn, for example by a timeout around its call. The request is then called
back, and its tokens are *undecided*: they are kept if the episode says so. Otherwise they are
dropped and counted as soon as the episode continues.
"""

from __future__ import annotations

from aprilsched.core.messages.commands import ResolveTurn
from aprilsched.core.messages.events import (
    EpisodeFailed,
    EpisodeFinished,
    TurnKept,
    TurnRequested,
    TurnWithdrawn,
)
from aprilsched.core.messages.facts import TurnBegun, TurnEnded
from aprilsched.core.state.ledger import Reason
from aprilsched.core.state.lifecycle import GENERATING, Move, State
from aprilsched.core.state.records import RequestRecord, RolloutRecord
from aprilsched.core.state.state import SchedulerState
from aprilsched.core.steps.drop import abort, drop
from aprilsched.core.steps.episode_replay import (
    AnsweredTurn,
    ask_again,
    forget_rest,
    leave_one,
    truncate_to_answered,
)
from aprilsched.core.steps.scoring import finish
from aprilsched.types import FinishReason

__all__ = [
    "end_turn",
    "on_episode_failed",
    "on_episode_finished",
    "on_turn_kept",
    "on_turn_requested",
    "on_turn_withdrawn",
    "take_back",
]


def end_turn(state: SchedulerState, request: RequestRecord) -> None:
    """End the turn of a request that has run to its end."""
    rollout = request.rollout
    withdrawn = rollout.state is State.RETURNING
    rollout.move(Move.END_TURN)
    state.in_flight.forget(request)
    if withdrawn:
        _hand_back(state, rollout, request.output_start)
        return
    rollout.turns += 1
    if not state.caller.episodes:
        finish(state, rollout, None)
        return
    rollout.answered.append((request.output_start, len(rollout.log), rollout.finish_reason))
    _answer(state, rollout, rollout.turns - 1)


def take_back(state: SchedulerState, request: RequestRecord) -> None:
    """Take back a request that was interrupted before its end. Its rest waits to be sent again."""
    whole = request.remaining <= 0 and not (state.rolling and request.rollout.log.mixed)
    if request.rollout.group.dropped is not None:
        state.in_flight.forget(request)
    elif whole or request.rollout.state is State.RETURNING:
        # The abort came after the last token, or the turn was withdrawn.
        request.rollout.finish_reason = "length"
        end_turn(state, request)
    else:
        state.in_flight.requeue(request)


def on_turn_requested(state: SchedulerState, event: TurnRequested) -> None:
    rollout = state.in_flight.rollouts.get(event.rollout_id)
    if rollout is None:
        return
    _drop_undecided(state, rollout)
    known = ask_again(state, rollout, event.input_ids)
    before = len(rollout.log)
    if isinstance(known, AnsweredTurn):
        _tell_begun(state, rollout, before)
        rollout.turns += 1
        _answer(state, rollout, known.turn)
        return
    sampling = event.sampling or rollout.sampling
    if known is not None:
        leave_one(state, rollout, known.begin, sampling.max_new_tokens)
    state.in_flight.add_request(
        rollout,
        event.input_ids,
        sampling,
        output_start=None if known is None else known.begin,
    )
    _tell_begun(state, rollout, before)


def _tell_begun(state: SchedulerState, rollout: RolloutRecord, before: int) -> None:
    """Tell listeners that an episode asks for a turn; the response had `before` tokens before
    it."""
    state.tell(
        TurnBegun(
            rollout_id=rollout.rollout_id,
            prompt_tokens=len(rollout.prompt_ids),
            environment=max(0, len(rollout.log) - before),
        )
    )


def on_turn_withdrawn(state: SchedulerState, event: TurnWithdrawn) -> None:
    rollout = state.in_flight.rollouts.get(event.rollout_id)
    if rollout is None or rollout.state is State.RETURNING:
        return
    if rollout.state is State.THINKING:
        _withdraw_answered(state, rollout)
        return
    request = rollout.request
    if request is None or rollout.state not in GENERATING:
        return
    rollout.move(Move.WITHDRAW)
    state.stragglers.run_on.pop(request.request_id, None)
    if request.open:
        abort(state, request)
        return
    state.in_flight.queue.discard(request)
    state.in_flight.forget(request)
    state.in_flight.journal.change(rollout)
    rollout.finish_reason = "length"
    _hand_back(state, rollout, request.output_start)


def on_turn_kept(state: SchedulerState, event: TurnKept) -> None:
    rollout = state.in_flight.rollouts.get(event.rollout_id)
    if rollout is None or rollout.undecided is None:
        return
    begin, rollout.undecided = rollout.undecided, None
    rollout.turns += 1
    if rollout.replay is not None:
        rollout.replay.answered += 1
    else:
        rollout.answered.append((begin, len(rollout.log), rollout.finish_reason))
        state.in_flight.journal.change(rollout)


def on_episode_finished(state: SchedulerState, event: EpisodeFinished) -> None:
    rollout = state.in_flight.rollouts.get(event.rollout_id)
    if rollout is None:
        return
    _drop_undecided(state, rollout)
    if rollout.turns == 0:
        _fail(state, event.rollout_id, "the episode returned without generating anything")
    else:
        if rollout.replay is not None:
            forget_rest(state, rollout)
        if state.rolling and rollout.log.mixed:
            # A turn that the episode withdrew, and kept, met an engine with other weights.
            cause = "an engine had another version than the one that its first turn was of"
            drop(state, rollout.group, Reason.VERSION_LOST, cause, culprit=rollout.rollout_id)
            return
        finish(state, rollout, event.score)


def on_episode_failed(state: SchedulerState, event: EpisodeFailed) -> None:
    _fail(state, event.rollout_id, event.cause)


def _withdraw_answered(state: SchedulerState, rollout: RolloutRecord) -> None:
    """Withdraw a turn that is answered already: the episode was cancelled before it got the
    answer."""
    if rollout.undecided is not None or not rollout.turns:
        return
    rollout.turns -= 1
    if rollout.replay is not None:
        rollout.replay.answered -= 1
        begin, end, reason = rollout.answered[rollout.replay.answered]
        rollout.undecided = begin
        _resolve(state, rollout, begin, end, reason, withdrawn=True)
        return
    begin, _, rollout.finish_reason = rollout.answered.pop()
    state.in_flight.journal.change(rollout)
    _hand_back(state, rollout, begin)


def _hand_back(state: SchedulerState, rollout: RolloutRecord, begin: int) -> None:
    """Answer a withdrawn turn, whose request is back. The episode decides whether its tokens
    stay."""
    rollout.undecided = begin
    _resolve(state, rollout, begin, len(rollout.log), rollout.finish_reason, withdrawn=True)


def _drop_undecided(state: SchedulerState, rollout: RolloutRecord) -> None:
    if rollout.undecided is None:
        return
    rollout.undecided = None
    replay, rollout.replay = rollout.replay, None
    if replay is not None:
        del rollout.answered[replay.answered :]
    rollout.finish_reason = rollout.answered[-1][2] if rollout.answered else "length"
    truncate_to_answered(state, rollout, Reason.WITHDRAWN)


def _answer(state: SchedulerState, rollout: RolloutRecord, turn: int) -> None:
    begin, end, reason = rollout.answered[turn]
    _resolve(state, rollout, begin, end, reason, withdrawn=False)


def _resolve(
    state: SchedulerState,
    rollout: RolloutRecord,
    begin: int,
    end: int,
    reason: FinishReason,
    *,
    withdrawn: bool,
) -> None:
    ids, logprobs, versions = rollout.log.tail(begin)
    size = end - begin
    state.tell(
        TurnEnded(
            rollout_id=rollout.rollout_id,
            tokens=size,
            finish_reason=reason,
            withdrawn=withdrawn,
        )
    )
    state.commands.append(
        ResolveTurn(
            rollout_id=rollout.rollout_id,
            token_ids=ids[:size],
            logprobs=logprobs[:size],
            versions=versions[:size],
            finish_reason=reason,
            withdrawn=withdrawn,
        )
    )


def _fail(state: SchedulerState, rollout_id: int, cause: str) -> None:
    rollout = state.in_flight.rollouts.get(rollout_id)
    if rollout is not None:
        drop(state, rollout.group, Reason.EPISODE_FAILED, cause, culprit=rollout_id)
