"""Handles the turns of rollouts: a plain rollout has one, an episode any number.

An episode may withdraw a turn, for example by a timeout around its call. The request is then
aborted, and its tokens are *undecided*: they are kept if the episode requests that. Otherwise they
are dropped and counted as soon as the episode continues.
"""

from __future__ import annotations

from aprilsched.kernel.core.messages import commands as do
from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.messages import facts
from aprilsched.kernel.core.state.durations import Durations
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import GENERATING, RequestRecord, RolloutRecord, State
from aprilsched.kernel.core.state.state import Outbox, SchedulerState
from aprilsched.kernel.core.steps.branches import forget, settle, take_branch
from aprilsched.kernel.core.steps.drop import abort, drop
from aprilsched.kernel.core.steps.episode_replay import (
    context_of,
    forget_rest,
    keep_rest,
    known_turn,
    leave_one,
    truncate,
)
from aprilsched.kernel.core.steps.scoring import finish
from aprilsched.kernel.core.steps.sessions import end_session_turn
from aprilsched.types import FinishReason


def start_episode(out: Outbox, rollout: RolloutRecord) -> None:
    """Start the episode that drives a rollout."""
    out.tell(facts.EpisodeStarted(rollout_id=rollout.rollout_id))
    known: list[tuple[int, int]] = []
    partial_turn: tuple[int, int] | None = None
    if rollout.replay is not None:
        turns = [(start, branch) for start, _, _, branch in rollout.answered]
        known = [do.context_mark(context_of(rollout, *turn)) for turn in turns]
        if rollout.replay.partial is not None:
            context = context_of(rollout, rollout.replay.partial, rollout.branch)
            partial_turn = do.context_mark(context)
    out.commands.append(
        do.StartEpisode(
            rollout_id=rollout.rollout_id,
            index=rollout.index,
            prompt=rollout.group.prompt,
            sampling=rollout.sampling,
            known=tuple(known),
            partial_turn=partial_turn,
        )
    )


def end_turn(state: SchedulerState, request: RequestRecord) -> None:
    """End the turn of a finished request."""
    rollout = request.rollout
    withdrawn = rollout.state is State.RETURNING
    rollout.move("end_turn")
    state.in_flight.forget(request)
    if withdrawn:
        _hand_back(state.out, rollout, request.output_start)
        return
    rollout.turns += 1
    if not state.caller.episodes:
        finish(state, rollout, None)
        return
    _note_answered(rollout, request.output_start)
    rollout.answered_at = state.now
    end_session_turn(state, request)
    _answer(state.out, rollout, len(rollout.answered) - 1)


def _note_answered(rollout: RolloutRecord, start: int) -> None:
    rollout.answered.append((start, rollout.log.size, rollout.finish_reason, rollout.branch))
    if rollout.replay is not None:
        rollout.replay.asked.append(len(rollout.answered) - 1)


def refuse_turn(in_flight: InFlight, out: Outbox, request: RequestRecord, cause: str) -> None:
    """End the turn of a refused request; its episode continues after the previous turn."""
    rollout = request.rollout
    rollout.move("end_turn")
    in_flight.forget(request)
    in_flight.journal.change(rollout)
    rollout.undecided = request.output_start
    _drop_undecided(in_flight, out, rollout, Reason.FAILED)
    rollout.refused = True
    in_flight.counters.turns_refused += 1
    end = rollout.log.size
    _resolve(out, rollout, end, end, "length", withdrawn=False, refused=cause)


def take_back(state: SchedulerState, request: RequestRecord) -> None:
    """Take back a request that was interrupted before its end, and requeue the rest."""
    whole = request.remaining <= 0 and not (state.rolling and request.rollout.log.mixed)
    if request.rollout.group.dropped is not None:
        state.in_flight.forget(request)
    elif whole or request.rollout.state is State.RETURNING:
        # The abort came after the last token, or the turn was withdrawn.
        request.rollout.finish_reason = "length"
        end_turn(state, request)
    else:
        state.in_flight.requeue(request)


def on_turn_requested(
    state: SchedulerState, rollout: RolloutRecord, event: ev.TurnRequested
) -> None:
    _drop_undecided(state.in_flight, state.out, rollout)
    rollout.refused = False
    turn, start = known_turn(state.in_flight, state.out, rollout, event)
    before = rollout.log.size
    if turn is not None:
        _tell_begun(state.out, rollout, before)
        rollout.turns += 1
        _answer(state.out, rollout, turn)
        return
    _note_gap(state.now, rollout, state.calls.gaps)
    if event.branch and start is None and rollout.answered:
        take_branch(state.in_flight, rollout, event.input_ids)
    sampling = event.sampling or rollout.sampling
    if start is not None:
        leave_one(state.in_flight, state.out, rollout, start, sampling.max_new_tokens)
    state.in_flight.add_request(
        rollout, event.input_ids, sampling, media=event.media, output_start=start
    )
    _tell_begun(state.out, rollout, before)


def _note_gap(now: float, rollout: RolloutRecord, gaps: Durations) -> None:
    """Record the time that an episode took since the answer to its last turn."""
    if rollout.answered_at is not None and rollout.group.evaluation_id is None:
        gaps.add(now - rollout.answered_at)
    rollout.answered_at = None


def _tell_begun(out: Outbox, rollout: RolloutRecord, before: int) -> None:
    """Report to listeners that an episode requests a turn.

    The response had `before` tokens before this turn.
    """
    out.tell(
        facts.TurnBegun(
            rollout_id=rollout.rollout_id,
            prompt_tokens=len(rollout.prompt_ids),
            environment=max(0, rollout.log.size - before),
        )
    )


def on_turn_withdrawn(state: SchedulerState, rollout: RolloutRecord, _: ev.TurnWithdrawn) -> None:
    if rollout.state is State.RETURNING:
        return
    if rollout.state is State.THINKING:
        _withdraw_answered(state.in_flight, state.out, rollout)
        return
    request = rollout.request
    if request is None or rollout.state not in GENERATING:
        return
    rollout.move("withdraw")
    if request.open:
        abort(state.in_flight, state.out, request)
        return
    state.in_flight.queue.discard(request)
    state.in_flight.forget(request)
    state.in_flight.journal.change(rollout)
    rollout.finish_reason = "length"
    _hand_back(state.out, rollout, request.output_start)


def on_episode_waits(state: SchedulerState, rollout: RolloutRecord, event: ev.EpisodeWaits) -> None:
    if rollout.state is State.THINKING:
        state.out.tell(facts.EpisodeWaiting(rollout_id=event.rollout_id, what=event.what))


def on_turn_kept(state: SchedulerState, rollout: RolloutRecord, _: ev.TurnKept) -> None:
    if rollout.undecided is None:
        return
    start, rollout.undecided = rollout.undecided, None
    rollout.turns += 1
    replay = rollout.replay
    if replay is not None and replay.withdrawn is not None:
        replay.asked.append(replay.withdrawn)
        replay.withdrawn = None
    else:
        _note_answered(rollout, start)
        state.in_flight.journal.change(rollout)


def on_episode_finished(
    state: SchedulerState, rollout: RolloutRecord, event: ev.EpisodeFinished
) -> None:
    _drop_undecided(state.in_flight, state.out, rollout)
    if rollout.replay is not None and event.keeps_known:
        keep_rest(state.in_flight, state.out, rollout)
    if rollout.turns == 0:
        cause = "the episode returned without generating anything"
        drop(state, rollout.group, Reason.EPISODE_FAILED, cause, culprit=rollout.rollout_id)
    else:
        if rollout.replay is not None:
            forget_rest(state.in_flight, state.out, rollout)
        if state.rolling and rollout.log.mixed:
            # A turn that the episode withdrew and kept ran on an engine with other weights.
            cause = "an engine had another version than the one that its first turn was of"
            drop(state, rollout.group, Reason.VERSION_LOST, cause, culprit=rollout.rollout_id)
            return
        _note_gap(state.now, rollout, state.calls.ends)
        if rollout.group.evaluation_id is None:
            state.calls.turns.append(rollout.turns)
        settle(state.in_flight, state.out, rollout, event.branches)
        finish(state, rollout, event.score)


def _withdraw_answered(in_flight: InFlight, out: Outbox, rollout: RolloutRecord) -> None:
    """Withdraw an answered turn: the episode was cancelled before it received the answer."""
    if rollout.refused:
        _hand_back(out, rollout, rollout.log.size)
        return
    if rollout.undecided is not None or not rollout.turns:
        return
    rollout.turns -= 1
    replay = rollout.replay
    if replay is not None and (turn := replay.asked.pop()) < replay.known:
        replay.withdrawn = turn
        start, end, reason, _ = rollout.answered[turn]
        rollout.undecided = start
        _resolve(out, rollout, start, end, reason, withdrawn=True)
        return
    start, _, rollout.finish_reason, _ = rollout.answered.pop()
    in_flight.journal.change(rollout)
    _hand_back(out, rollout, start)


def _hand_back(out: Outbox, rollout: RolloutRecord, start: int) -> None:
    """Answer a withdrawn turn whose request is back; the episode decides about its tokens."""
    rollout.undecided = start
    _resolve(out, rollout, start, rollout.log.size, rollout.finish_reason, withdrawn=True)


def _drop_undecided(
    in_flight: InFlight, out: Outbox, rollout: RolloutRecord, reason: Reason = Reason.WITHDRAWN
) -> None:
    if rollout.undecided is None:
        return
    rollout.undecided = None
    replay = rollout.replay
    if replay is not None and replay.withdrawn is not None:
        rollout.replay = None
        forget(in_flight, out, rollout, replay.asked, reason)
    else:
        truncate(in_flight, out, rollout, rollout.answered_size, reason)
    rollout.finish_reason = rollout.answered[-1][2] if rollout.answered else "length"


def _answer(out: Outbox, rollout: RolloutRecord, turn: int) -> None:
    start, end, reason, _ = rollout.answered[turn]
    _resolve(out, rollout, start, end, reason, withdrawn=False)


def _resolve(
    out: Outbox,
    rollout: RolloutRecord,
    start: int,
    end: int,
    reason: FinishReason,
    *,
    withdrawn: bool,
    refused: str = "",
) -> None:
    ids, logprobs, versions = rollout.log.tail(start)
    size = end - start
    out.tell(
        facts.TurnEnded(
            rollout_id=rollout.rollout_id,
            tokens=size,
            finish_reason=reason,
            withdrawn=withdrawn,
            refused=refused,
        )
    )
    out.commands.append(
        do.ResolveTurn(
            rollout_id=rollout.rollout_id,
            token_ids=ids[:size],
            logprobs=logprobs[:size],
            versions=versions[:size],
            finish_reason=reason,
            withdrawn=withdrawn,
            refused=refused,
            companions=rollout.log.companion_rows(prompt=len(rollout.prompt_ids), end=end),
        )
    )
