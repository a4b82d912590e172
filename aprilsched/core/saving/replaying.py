"""Episodes after a restart: a coroutine cannot be saved, so it runs again from its begin.

The turns that it was given before are given again, without generating, as long as it asks for
them with the same context (as durable workflows replay their history); an unfinished turn goes on
from its tokens. Where it takes another way, what was known from there on is forgotten, and
counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aprilsched.core.ledger import Reason
from aprilsched.core.records import Replay, RolloutRecord
from aprilsched.core.state import SchedulerState
from aprilsched.types import NO_VERSION, Int32Array

__all__ = ["AnsweredTurn", "BegunTurn", "ask_again", "forget_rest"]


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """The turn is known to its end: that of this number."""

    turn: int


@dataclass(frozen=True, slots=True)
class BegunTurn:
    """The turn is known from here on, but not to its end."""

    begin: int


def ask_again(
    state: SchedulerState, rollout: RolloutRecord, input_ids: Int32Array
) -> AnsweredTurn | BegunTurn | None:
    """What is known of the turn that the episode asks for; None if nothing is."""
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
    """The episode goes another way than before, or ends earlier."""
    replay, rollout.replay = rollout.replay, None
    if replay is None:
        return
    del rollout.answered[replay.answered :]
    size = rollout.answered[-1][1] if rollout.answered else 0
    forgotten = int((rollout.log.versions()[size:] != NO_VERSION).sum())
    if len(rollout.log) == size:
        return
    rollout.log.cut(size)
    rollout.anew = True
    state.book.journal.change(rollout)
    state.book.counters.tokens_discarded += forgotten
    state.book.ledger.late_tokens(Reason.RESTARTED, forgotten)


def _begin(rollout: RolloutRecord, replay: Replay) -> int | None:
    """Where the output of the next turn that is known begins."""
    if replay.answered < len(rollout.answered):
        return rollout.answered[replay.answered][0]
    return replay.partial


def _known(rollout: RolloutRecord, begin: int) -> int:
    return len(rollout.prompt_ids) + begin
