"""The states of a rollout, and the table of its legal moves.

A move that is not in the table raises an error. "Carried" is not a state: a rollout is carried when
a batch was delivered while it was queued, running or held.
"""

from __future__ import annotations

from enum import StrEnum

from aprilsched.errors import InvariantViolation


class State(StrEnum):
    """The state of a rollout."""

    QUEUED = "queued"
    """Its request waits to be sent, for the first time or with the tokens known so far."""
    RUNNING = "running"
    """Its request is with an engine."""
    HELD = "held"
    """Its request is inside a paused engine."""
    RETURNING = "returning"
    """The episode withdrew its turn, and the request is being called back from its engine."""
    THINKING = "thinking"
    """Its episode runs tools or an environment between two requests."""
    SCORING = "scoring"
    """It is generated to its end, and its reward is being computed."""
    DONE = "done"
    """It is scored, and waits for its siblings or for its batch."""
    DELIVERED = "delivered"
    DROPPED = "dropped"
    """It is in the ledger, with the reason."""


class Move(StrEnum):
    """What can happen to a rollout."""

    SEND = "send"
    HOLD = "hold"
    CONTINUE = "continue"
    INTERRUPT = "interrupt"
    WITHDRAW = "withdraw"
    END_TURN = "end_turn"
    NEXT_TURN = "next_turn"
    FINISH = "finish"
    SCORE = "score"
    DELIVER = "deliver"
    DROP = "drop"


GENERATING = frozenset({State.QUEUED, State.RUNNING, State.HELD, State.RETURNING, State.THINKING})
TERMINAL = frozenset({State.DELIVERED, State.DROPPED})

MOVES: dict[tuple[State, Move], State] = {
    (State.QUEUED, Move.SEND): State.RUNNING,
    (State.RUNNING, Move.HOLD): State.HELD,
    (State.HELD, Move.CONTINUE): State.RUNNING,
    # A request that was aborted, that failed, or whose engine was lost comes back with its tokens.
    (State.RUNNING, Move.INTERRUPT): State.QUEUED,
    (State.HELD, Move.INTERRUPT): State.QUEUED,
    # The last tokens of a request may still be on their way when the pause is confirmed.
    (State.RUNNING, Move.END_TURN): State.THINKING,
    (State.HELD, Move.END_TURN): State.THINKING,
    # A request that waits is taken out of the queue. One that is with an engine has to come back.
    (State.QUEUED, Move.WITHDRAW): State.THINKING,
    (State.RUNNING, Move.WITHDRAW): State.RETURNING,
    (State.HELD, Move.WITHDRAW): State.RETURNING,
    (State.RETURNING, Move.END_TURN): State.THINKING,
    (State.THINKING, Move.NEXT_TURN): State.QUEUED,
    (State.THINKING, Move.FINISH): State.SCORING,
    (State.SCORING, Move.SCORE): State.DONE,
    (State.DONE, Move.DELIVER): State.DELIVERED,
    # From every state but the two last ones.
    **{(state, Move.DROP): State.DROPPED for state in State if state not in TERMINAL},
}


def after(state: State, move: Move) -> State:
    """The state that `move` leads to.

    Raises:
        InvariantViolation: if the table has no such move.
    """
    try:
        return MOVES[state, move]
    except KeyError:
        raise InvariantViolation(f"a {state} rollout cannot {move}") from None
