"""Replays the known turns of episodes after a restart.

A coroutine cannot be saved, so after a restart an episode runs again from the start. As long as it
requests the same turns with the same contexts, it gets the saved answers without generation, as
durable workflows replay their history. An unfinished turn continues from its tokens. If the episode
requests something else, all later tokens are discarded and counted.

An episode with branches may request its known turns in any order, because the order of its calls
may change. Turns that it has not requested are discarded at its end.
"""

from __future__ import annotations

import numpy as np

from aprilsched.kernel.core.messages import events as ev
from aprilsched.kernel.core.state.in_flight import InFlight
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.records import RolloutRecord
from aprilsched.kernel.core.state.state import Outbox
from aprilsched.kernel.core.state.token_log import clipped
from aprilsched.kernel.core.steps.branches import forget
from aprilsched.kernel.core.steps.drop import discard
from aprilsched.types import NO_VERSION, Int32Array


def known_turn(
    in_flight: InFlight, out: Outbox, rollout: RolloutRecord, event: ev.TurnRequested
) -> tuple[int | None, int | None]:
    """Return what is known of the turn that the episode requests.

    The first value is the index of an answered turn; the second is the log position where the
    output of an unfinished turn starts. Both are None if nothing is known.
    """
    replay = rollout.replay
    if replay is None:
        return None, None
    open_turns = [turn for turn in range(replay.known) if turn not in replay.asked]
    for turn in open_turns if event.branch else open_turns[:1]:
        start, _, _, branch = rollout.answered[turn]
        if np.array_equal(event.input_ids, context_of(rollout, start, branch)):
            replay.asked.append(turn)
            return turn, None
    start = replay.partial
    due = start is not None and (event.branch or not open_turns)
    context = context_of(rollout, start or 0, rollout.branch)
    if due and np.array_equal(event.input_ids, context):
        replay.partial = None
        rollout.replay = replay if open_turns else None
        return None, start
    if not event.branch or not open_turns:
        forget_rest(in_flight, out, rollout)
    else:
        # Later tokens are appended after the last answer.
        replay.partial = None
        truncate(in_flight, out, rollout, rollout.answered_size, Reason.RESTARTED)
    return None, None


def context_of(rollout: RolloutRecord, start: int, number: int) -> Int32Array:
    """Return the context of a branch's output that starts at this log position."""
    branch = rollout.all_branches()[number]
    response = rollout.log.along(clipped(branch.path, start))
    return np.concatenate((branch.prompt_ids, response))


def forget_rest(in_flight: InFlight, out: Outbox, rollout: RolloutRecord) -> None:
    """Discard the remaining known turns: the episode takes another course or ends earlier."""
    replay, rollout.replay = rollout.replay, None
    if replay is not None:
        forget(in_flight, out, rollout, replay.asked, Reason.RESTARTED)


def keep_rest(in_flight: InFlight, out: Outbox, rollout: RolloutRecord) -> None:
    """Keep the known turns that the episode has not requested again."""
    rollout.replay = None
    rollout.turns = len(rollout.answered)
    truncate(in_flight, out, rollout, rollout.answered_size, Reason.RESTARTED)


def leave_one(
    in_flight: InFlight, out: Outbox, rollout: RolloutRecord, start: int, limit: int
) -> None:
    """Discard tokens so that a request for `limit` tokens has at least one token to generate.

    The output of the request is known from `start` on. An engine cannot generate zero tokens, and
    it reports the finish reason only with the last token. All tokens may be known because the
    process ended between the last token of a request and its end, or because the episode requests
    fewer tokens this time.
    """
    if rollout.log.size - start >= limit:
        truncate(in_flight, out, rollout, start + limit - 1, Reason.RESTARTED)


def truncate(
    in_flight: InFlight, out: Outbox, rollout: RolloutRecord, size: int, reason: Reason
) -> None:
    """Discard and count all tokens after the first `size`.

    This includes tokens of the environment, because the episode may now send other ones.
    """
    log = rollout.log
    if log.size == size:
        return
    sampled = int((log.versions()[size:] != NO_VERSION).sum())
    environment = log.size - size - sampled
    log.truncate(size, prompt=len(rollout.prompt_ids))
    discard(in_flight, out, rollout, sampled, environment, reason)
