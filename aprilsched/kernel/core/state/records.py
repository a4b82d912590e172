"""The states of a rollout, the table of its legal moves, and the mutable records of a group, its
rollouts and their requests, and of a batch.

A rollout has at most one request at a time; a rollout of several turns has one request after the
other. A request may take several attempts: each time that it is sent is one attempt. "Carried" is
not a state: a rollout is carried when a batch was delivered while it was queued, running or held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.lengths.observed import GroupLengths, padded
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.token_log import Path, TokenLog
from aprilsched.kernel.values.companions import CompanionLog
from aprilsched.types import FinishReason, Int32Array, Media, Prompt, SamplingParams, Score


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An engine refused a request. If another engine takes it, the fault is the engine's."""

    engine: str
    sent: int
    """The number of the refused attempt among all attempts, in the order of sending."""
    cause: str


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One generation request."""

    request_id: int
    rollout: RolloutRecord
    sampling: SamplingParams
    output_start: int
    """Where the output of the request begins in the rollout's token log."""
    media: tuple[Media, ...] | None = None
    """All media of the context; None for those of the prompt."""
    attempt: int = 0
    """Number of attempts so far."""
    attempt_start: int = 0
    """Where the output of the latest attempt begins in the rollout's token log."""
    open: bool = False
    """An attempt is with an engine and has not come back."""
    engine: str = ""
    """The engine that the latest attempt was sent to."""
    sent: int = 0
    """The number of the latest attempt among all attempts, in the order of sending."""
    version: int = 0
    """The version that the open attempt samples under now."""
    sent_version: int = 0
    """The version that the latest attempt was sent under."""
    adapter: int | None = None
    """The version of the adapter that the attempt samples with; None for the model itself."""
    crossed: bool = False
    """The engine was refitted during the attempt."""
    unsure: bool = False
    """Tokens have arrived since a refit during the attempt. Until the engine reports the attempt's
    versions, it is not known which of them were sampled before the refit."""
    kept_keys: bool = False
    """The attempt goes on with KV that older weights computed."""
    failures: int = 0
    """Attempts in a row that failed without a new token."""
    interruptions: int = 0
    """Attempts that failed after new tokens, never reached their engine, or were on an engine that
    was lost."""
    avoid: frozenset[str] = frozenset()
    """Engines on which the request failed since its last new token."""
    refusal: Refusal | None = None
    """The first engine's refusal or failure, while another engine may take the request."""
    aborting: bool = False
    """The open attempt was told to abort and has not come back."""
    destination: str = ""
    """The engine that it is on its way to, because the KV pool of the other one is full."""
    moved: bool = False
    """It was moved once for that, so it stays from now on."""
    pending_prefill: int = 0
    """Context tokens that the engine recomputes before the attempt's next chunk."""
    media_tokens: int = 0
    """Tokens of the latest attempt's context that media became, as far as that is known."""

    @property
    def generated(self) -> int:
        """Tokens of the request's output so far."""
        return self.rollout.log.size - self.output_start

    @property
    def gained(self) -> bool:
        """Whether the latest attempt has brought new tokens."""
        return self.rollout.log.size > self.attempt_start

    @property
    def remaining(self) -> int:
        """Tokens that the request may still generate."""
        return self.sampling.max_new_tokens - self.generated

    def shun(self, engine: str) -> None:
        """Note that the attempt that has just been closed failed on `engine`."""
        before = frozenset[str]() if self.gained else self.avoid
        self.avoid = before | {engine}


@dataclass(slots=True, kw_only=True)
class Replay:
    """How far an episode that was started again has asked for the turns that are known already."""

    known: int
    """Number of turns that are known from before the restart."""
    asked: list[int] = field(default_factory=list[int])
    """The turns that the episode was given in this process, by their places among the answered
    ones."""
    partial: int | None = None
    """Where the output of the unfinished turn begins; None if there is none."""
    withdrawn: int | None = None
    """The known turn that was given again and withdrawn, while nobody has said whether it is
    kept."""


Answered: TypeAlias = tuple[int, int, FinishReason, int]
"""A turn that an episode was given: where its output begins in the log, where it ends, why it
ended, and the number of its branch."""


@dataclass(slots=True, kw_only=True, eq=False)
class Branch:
    """One token sequence of a rollout that has several."""

    prompt_ids: Int32Array
    path: Path = ()
    """Its response tokens in the log of the rollout."""
    companions: dict[str, CompanionLog] = field(default_factory=dict[str, CompanionLog])
    """Rows of its own prompt and path."""


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutRecord:
    """One rollout in flight, or in a batch that is not acknowledged."""

    rollout_id: int
    index: int
    group: GroupRecord
    sampling: SamplingParams
    state: State
    prompt_ids: Int32Array
    log: TokenLog = field(default_factory=TokenLog)
    request: RequestRecord | None = None
    turns: int = 0
    """Finished turns."""
    engine: str = ""
    """The engine that its latest attempt was sent to; empty before the first one of this
    process."""
    eligible: bool = True
    """The rollout may generate now; otherwise it is deferred until its group is chosen."""
    reward: float | None = None
    # Literals, because `dict[str, float]()` takes ten times as long: it tries to note its types.
    reward_parts: dict[str, float] = field(default_factory=lambda: {})
    info: dict[str, Any] = field(default_factory=lambda: {})
    finish_reason: FinishReason = "length"
    answered: list[Answered] = field(default_factory=lambda: [])
    """The turns that an episode was given, in the order of their output."""
    branches: list[Branch] = field(default_factory=lambda: [])
    """The branches, of which each began where its context left all others; empty for one. That of
    the branch at work is as it was when another one was at work."""
    branch: int = 0
    """Number of the branch at work, to which `prompt_ids` and the path of the log belong."""
    replay: Replay | None = None
    """Set while an episode that was started again asks for turns that are known already."""
    answered_at: float | None = None
    """When its episode was given the answer to its last turn, in seconds; None while a turn is
    open, before the first one, and where that was before a restart."""
    undecided: int | None = None
    """Where the tokens of a withdrawn turn begin, while the episode has not said whether it keeps
    them."""
    refused: bool = False
    """Engines refused its latest turn."""
    again: int = 0
    """Number of times that this member of its group was generated or scored again."""
    rewritten: bool = False
    """Saved tokens of the rollout are void: the next snapshot saves all of its tokens again."""

    def move(self, move: Move) -> None:
        """Make a move of the life-cycle table.

        Raises:
            InvariantViolation: if the table has no such move.
        """
        try:
            self.state = MOVES[self.state, move]
        except KeyError:
            raise InvariantViolation(f"a {self.state} rollout cannot {move}") from None

    def attach(self, score: Score) -> None:
        """Take a reward with its parts and info. Those of the episode stay where the score of the
        reward function has no other value for a name."""
        if score.reward is not None:
            self.reward = score.reward
        # New mappings, because facts and rollouts that were made before have the former ones.
        self.reward_parts = {**self.reward_parts, **score.parts}
        self.info = {**self.info, **score.info}

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and response so far, of the branch at work."""
        return len(self.prompt_ids) + self.log.path_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens of the context inside an engine, where media are expanded."""
        own = 0 if self.request is None else self.request.media_tokens
        return self.context_tokens + max(own, self.group.media_tokens)

    def context(self) -> Int32Array:
        """Prompt and response so far, int32 [P + T], as the engine must see it."""
        return self.log.after(self.prompt_ids)

    def all_branches(self) -> list[Branch]:
        """Every branch as it is now."""
        now = Branch(prompt_ids=self.prompt_ids, path=self.log.path, companions=self.log.companions)
        branches = list(self.branches) or [now]
        branches[self.branch] = now
        return branches

    @property
    def carried(self) -> bool:
        """Whether the rollout was sent before. Carried rollouts go before those that were not."""
        return self.log.size > 0 or (self.request is not None and self.request.attempt > 0)


@dataclass(slots=True, kw_only=True, eq=False)
class GroupRecord:
    """The rollouts of one prompt."""

    group_id: int
    prompt: Prompt
    evaluation_id: int | None = None
    size: int = 0
    """Number of members that the group delivers."""
    members: list[RolloutRecord] = field(default_factory=list["RolloutRecord"])
    lost: int = 0
    """Number of lost members by which the group has shrunk."""
    unfinished: int = 0
    """Members that are still generating."""
    complete_at: float | None = None
    """When its last response ended, in seconds; None before that, and where that was before a
    restart."""
    accepted: bool | None = None
    """Whether the group is accepted; None until that is known."""
    engine: str = ""
    """The engine that the latest attempt of a member was sent to: it caches the prompt's prefix."""
    opened: int = 0
    """Number of batches before the one in work, when the group was launched."""
    again: int | None = None
    """The group of the same prompt in whose place this one came; None for a prompt's first."""
    first_run: int | None = None
    """Number of batches before the one in work, when a member was first chosen to run (length
    buckets); None until then."""
    dropped: Reason | None = None
    """Why the group was dropped; None while it is in flight."""
    offered: bool = False
    """The group is in the batch that is offered."""
    media_tokens: int = 0
    """Tokens that the media of the prompt became inside an engine, beside their placeholders."""

    @property
    def in_training(self) -> bool:
        """Whether it is a group of the trainer's batches, and was not dropped."""
        return self.evaluation_id is None and self.dropped is None

    @property
    def complete(self) -> bool:
        """Whether every member is generated to its end."""
        return self.unfinished == 0

    @property
    def scored(self) -> bool:
        """Whether every member has its reward."""
        return self.complete and all(member.state is State.DONE for member in self.members)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version among all tokens of the group."""
        versions = [member.log.oldest_version for member in self.members]
        return min([v for v in versions if v is not None], default=None)

    @property
    def tokens(self) -> int:
        """Response tokens of all members."""
        return sum([member.log.size for member in self.members])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeliveredBatch:
    """A batch that the trainer has, or is offered, and has not acknowledged. Its groups keep their
    members, so that a resumed run can deliver it again."""

    index: int
    version: int
    oldest_unmasked: int | None
    """Tokens of older versions than this are masked; None if none are."""
    groups: tuple[GroupRecord, ...]


def group_lengths(record: GroupRecord) -> GroupLengths:
    """The response lengths of a group, as evidence for the law of lengths."""
    return GroupLengths(
        launched=record.group_id,
        # A response that ended without a token counts as one of length 1, because the law of
        # lengths begins there.
        tokens=np.array(
            [max(m.log.size, m.state not in GENERATING) for m in record.members], dtype=np.int64
        ),
        finished=np.array([m.state not in GENERATING for m in record.members], dtype=np.bool_),
    )


def member_tokens(groups: Sequence[GroupRecord]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The tokens of each member so far, int64 [G, g], and whether it has finished, bool [G, g].
    Where a smaller group has no member, it is 0 and True."""
    tokens = [[member.log.size for member in group.members] for group in groups]
    finished = [[member.state not in GENERATING for member in g.members] for g in groups]
    return padded(tokens, 0, np.int64), padded(finished, True, np.bool_)
