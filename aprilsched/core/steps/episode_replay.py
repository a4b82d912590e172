"""Replays the known turns of episodes after a restart.

A coroutine cannot be saved, so after a restart an episode runs again from the start. As long as it
asks for the same turns with the same contexts, it is given the saved answers without generating, as
durable workflows replay their history. An unfinished turn continues from its tokens. If the episode
asks for something else, the tokens from there on are discarded and counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aprilsched.core.messages.commands import DiscardTokens
from aprilsched.core.messages.facts import TokensDiscarded
from aprilsched.core.state.ledger import Reason
from aprilsched.core.state.records import Replay, RolloutRecord
from aprilsched.core.state.state import SchedulerState
from aprilsched.types import NO_VERSION, Int32Array

__all__ = [
    "AnsweredTurn",
    "BegunTurn",
    "ask_again",
    "forget_rest",
    "leave_one",
    "truncate",
    "truncate_to_answered",
]


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """The turn with this number has a saved answer."""

    turn: int


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """The turn was saved in part; its output begins at position `begin` of the response."""

    begin: int


def ask_again(
    state: SchedulerState, rollout: RolloutRecord, input_ids: Int32Array
) -> AnsweredTurn | BegunTurn | None:
    """Find the saved part of the turn that the episode asks for; None if there is none."""
    replay = rollout.replay
    if replay is None:
        return None
    begin = _begin(rollout, replay)
    if begin is None or not np.array_equal(input_ids, rollout.context()[: _known(rollout, begin)]):
        forget_rest(state, rollout)
        return None
    if replay.answered == len(rollout.answered):
        rollout.replay = None
        return BegunTurn(begin)
    replay.answered += 1
    return AnsweredTurn(replay.answered - 1)


def forget_rest(state: SchedulerState, rollout: RolloutRecord) -> None:
    """Discard the rest of the known turns: the episode asks for something else, or ends earlier."""
    replay, rollout.replay = rollout.replay, None
    if replay is None:
        return
    del rollout.answered[replay.answered :]
    truncate_to_answered(state, rollout, Reason.RESTARTED)


def leave_one(state: SchedulerState, rollout: RolloutRecord, begin: int, limit: int) -> None:
    """Discard tokens so that a request for `limit` tokens has at least one token to generate.

    The output of the request is known from `begin` on. An engine cannot be asked for no tokens, and
    only with the last one it reports how the response ended. All tokens may be known because the
    process ended between the last token of a request and its end, or because the episode asks for
    fewer tokens this time.
    """
    if len(rollout.log) - begin >= limit:
        truncate(state, rollout, begin + limit - 1, Reason.RESTARTED)


def truncate_to_answered(state: SchedulerState, rollout: RolloutRecord, reason: Reason) -> None:
    """Discard everything after the last turn that the episode was given, including tokens of the
    environment, because the episode may say something else now."""
    truncate(state, rollout, rollout.answered[-1][1] if rollout.answered else 0, reason)


def truncate(state: SchedulerState, rollout: RolloutRecord, size: int, reason: Reason) -> None:
    """Discard all tokens after the first `size`, and count them."""
    log = rollout.log
    if len(log) == size:
        return
    sampled = int((log.versions()[size:] != NO_VERSION).sum())
    environment = len(log) - size - sampled
    log.truncate(size)
    # The tokens that were saved are void.
    rollout.rewritten = True
    state.in_flight.journal.change(rollout)
    state.in_flight.counters.tokens_discarded += sampled
    state.in_flight.ledger.late_tokens(reason, sampled)
    state.tell(
        TokensDiscarded(
            rollout_id=rollout.rollout_id,
            sampled=sampled,
            environment=environment,
            reason=reason.value,
        )
    )
    state.commands.append(
        DiscardTokens(
            rollout_id=rollout.rollout_id,
            sampled=sampled,
            environment=environment,
            reason=str(reason),
        )
    )


def _begin(rollout: RolloutRecord, replay: Replay) -> int | None:
    """Where the output of the next known turn begins; None if there is none."""
    if replay.answered < len(rollout.answered):
        return rollout.answered[replay.answered][0]
    return replay.partial


def _known(rollout: RolloutRecord, begin: int) -> int:
    return len(rollout.prompt_ids) + begin
