"""The life cycle of a rollout, and the mutable records of groups, rollouts, requests and batches.

A rollout has at most one request at a time; a rollout with several turns has a sequence of them. A
request may need several attempts, one for each time that it is sent. "Carried" is not a state: a
rollout is carried if it was queued, running or held when a batch was delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import InvariantViolation
from aprilsched.kernel.core.lengths.observed import GroupLengths, padded
from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.core.state.token_log import Path, TokenLog
from aprilsched.kernel.values.companions import CompanionLog
from aprilsched.types import (
    FinishReason,
    Int32Array,
    Media,
    Prompt,
    SamplingParams,
    Score,
    Sibling,
)


class State(StrEnum):
    """The state of a rollout."""

    QUEUED = "queued"
    """Its request waits to be sent, for the first time or with the tokens known so far."""
    RUNNING = "running"
    """Its request is in flight on an engine."""
    HELD = "held"
    """Its request is inside a paused engine."""
    RETURNING = "returning"
    """The episode withdrew its turn, and the request is being aborted on its engine."""
    THINKING = "thinking"
    """Its episode runs tools or an environment between two requests."""
    SCORING = "scoring"
    """Its response is finished, and its reward is being computed."""
    DONE = "done"
    """It is scored, and waits for its siblings or for its batch."""
    DELIVERED = "delivered"
    DROPPED = "dropped"
    """It is in the ledger, with the reason."""


Move: TypeAlias = Literal[
    "send",
    "hold",
    "continue",
    "interrupt",
    "withdraw",
    "end_turn",
    "next_turn",
    "finish",
    "score",
    "deliver",
    "drop",
]
"""A transition of a rollout's state."""

GENERATING = frozenset({State.QUEUED, State.RUNNING, State.HELD, State.RETURNING, State.THINKING})
TERMINAL = frozenset({State.DELIVERED, State.DROPPED})

MOVES: dict[tuple[State, Move], State] = {
    (State.QUEUED, "send"): State.RUNNING,
    (State.RUNNING, "hold"): State.HELD,
    (State.HELD, "continue"): State.RUNNING,
    # An aborted or failed request, or one whose engine is lost, is requeued with its tokens.
    (State.RUNNING, "interrupt"): State.QUEUED,
    (State.HELD, "interrupt"): State.QUEUED,
    # The last tokens of a request may still be in transit when the pause is confirmed.
    (State.RUNNING, "end_turn"): State.THINKING,
    (State.HELD, "end_turn"): State.THINKING,
    # A waiting request leaves the queue at once. One on an engine must first be aborted there.
    (State.QUEUED, "withdraw"): State.THINKING,
    (State.RUNNING, "withdraw"): State.RETURNING,
    (State.HELD, "withdraw"): State.RETURNING,
    (State.RETURNING, "end_turn"): State.THINKING,
    (State.THINKING, "next_turn"): State.QUEUED,
    (State.THINKING, "finish"): State.SCORING,
    (State.SCORING, "score"): State.DONE,
    (State.DONE, "deliver"): State.DELIVERED,
    # From every state but the two terminal ones.
    **{(state, "drop"): State.DROPPED for state in State if state not in TERMINAL},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An engine's refusal of a request; if another engine takes it, the engine is at fault."""

    engine: str
    sent: int
    """Number of the refused attempt among all attempts, in the order of sending."""
    cause: str


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One generation request."""

    request_id: int
    rollout: RolloutRecord
    sampling: SamplingParams
    output_start: int
    """Position of the request's output in the rollout's token log."""
    media: tuple[Media, ...] | None = None
    """All media of the context; None for the prompt's media."""
    attempt: int = 0
    """Number of attempts so far."""
    attempt_start: int = 0
    """Position of the latest attempt's output in the rollout's token log."""
    open: bool = False
    """Whether an attempt is in flight on an engine."""
    engine: str = ""
    """Engine of the latest attempt."""
    sent: int = 0
    """Number of the latest attempt among all attempts, in the order of sending."""
    version: int = 0
    """Version that the open attempt currently samples under."""
    sent_version: int = 0
    """Version that the latest attempt was sent under."""
    adapter: int | None = None
    """Version of the adapter that the attempt samples with; None for the model itself."""
    crossed: bool = False
    """Whether the engine was refitted during the attempt."""
    unsure: bool = False
    """Whether tokens have arrived since a refit during the attempt. Some of them may have been
    sampled before the refit, until the engine reports the attempt's versions."""
    kept_keys: bool = False
    """Whether the attempt continues with KV that older weights computed."""
    failures: int = 0
    """Number of consecutive attempts that failed without a new token."""
    interruptions: int = 0
    """Number of attempts that failed after new tokens, never reached their engine, or lost it."""
    avoid: frozenset[str] = frozenset()
    """Engines on which the request failed since its last new token."""
    refusal: Refusal | None = None
    """The first engine's refusal or failure, while another engine may take the request."""
    aborting: bool = False
    """Whether the open attempt is being aborted."""
    destination: str = ""
    """Engine that the request is moving to, because the KV pool of its engine is full."""
    moved: bool = False
    """Whether the request has moved for that reason. It moves only once."""
    pending_prefill: int = 0
    """Context tokens that the engine recomputes before the attempt's next chunk."""
    media_tokens: int = 0
    """Tokens that the media in the latest attempt's context expand to, if known."""

    @property
    def generated(self) -> int:
        """Number of tokens of the request's output so far."""
        return self.rollout.log.size - self.output_start

    @property
    def gained(self) -> bool:
        """Whether the latest attempt has produced new tokens."""
        return self.rollout.log.size > self.attempt_start

    @property
    def remaining(self) -> int:
        """Number of tokens that the request may still generate."""
        return self.sampling.max_new_tokens - self.generated

    def shun(self, engine: str) -> None:
        """Record that the attempt just closed failed on `engine`."""
        before = frozenset[str]() if self.gained else self.avoid
        self.avoid = before | {engine}


@dataclass(slots=True, kw_only=True)
class Replay:
    """Progress of a restarted episode through the turns that are already known."""

    known: int
    """Number of turns known from before the restart."""
    asked: list[int] = field(default_factory=list[int])
    """Turns that this process returned to the episode, as indexes into the answered turns."""
    partial: int | None = None
    """Position of the unfinished turn's output; None without such a turn."""
    withdrawn: int | None = None
    """The known turn that was replayed and withdrawn, until the episode decides whether to keep
    it."""


Answered: TypeAlias = tuple[int, int, FinishReason, int]
"""A turn returned to an episode: start and end of its output in the log, finish reason, number of
its branch."""


@dataclass(slots=True, kw_only=True, eq=False)
class Branch:
    """One of several token sequences of a rollout."""

    prompt_ids: Int32Array
    path: Path = ()
    """Parts of the rollout's log that make up its response."""
    companions: dict[str, CompanionLog] = field(default_factory=dict[str, CompanionLog])
    """Rows of the branch's prompt and path."""


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutRecord:
    """One rollout, in flight or in an unacknowledged batch."""

    rollout_id: int
    index: int
    group: GroupRecord
    sampling: SamplingParams
    state: State
    prompt_ids: Int32Array
    log: TokenLog = field(default_factory=TokenLog)
    request: RequestRecord | None = None
    turns: int = 0
    """Number of finished turns."""
    engine: str = ""
    """Engine of the latest attempt; empty before the first attempt in this process."""
    eligible: bool = True
    """Whether the rollout may generate now; otherwise it is deferred until its group is chosen."""
    reward: float | None = None
    # Literals, because `dict[str, float]()` takes ten times as long: it tries to set the types.
    reward_parts: dict[str, float] = field(default_factory=lambda: {})
    info: dict[str, Any] = field(default_factory=lambda: {})
    finish_reason: FinishReason = "length"
    answered: list[Answered] = field(default_factory=lambda: [])
    """Turns returned to the episode, in the order of their output."""
    branches: list[Branch] = field(default_factory=lambda: [])
    """The branches, each created when its context diverged from all others; empty if there is only
    one. The entry of the active branch is out of date until the next switch."""
    branch: int = 0
    """Number of the active branch, which `prompt_ids` and the path of the log belong to."""
    replay: Replay | None = None
    """Set while a restarted episode replays turns that are already known."""
    answered_at: float | None = None
    """Time in seconds when the episode got the answer to its last turn; None while a turn is open,
    before the first turn, and if the answer came before a restart."""
    undecided: int | None = None
    """Position of a withdrawn turn's tokens, until the episode decides whether to keep them."""
    refused: bool = False
    """Whether engines refused the latest turn."""
    again: int = 0
    """Number of times that this member of its group was regenerated or scored again."""
    rewritten: bool = False
    """Whether saved tokens of the rollout are void, so the next snapshot saves all of them."""

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
        """Add a reward with its parts and info.

        Values of the episode remain unless the reward function's score has the same name.
        """
        if score.reward is not None:
            self.reward = score.reward
        # New mappings, because earlier facts and rollouts refer to the previous ones.
        self.reward_parts = {**self.reward_parts, **score.parts}
        self.info = {**self.info, **score.info}

    @property
    def context_tokens(self) -> int:
        """Number of prompt and response tokens of the active branch so far."""
        return len(self.prompt_ids) + self.log.path_tokens

    @property
    def computed_tokens(self) -> int:
        """Number of context tokens inside an engine, which expands media."""
        own = 0 if self.request is None else self.request.media_tokens
        return self.context_tokens + max(own, self.group.media_tokens)

    def context(self) -> Int32Array:
        """Return prompt and response so far, int32 [P + T], as input of the engine."""
        return self.log.after(self.prompt_ids)

    def all_branches(self) -> list[Branch]:
        """Return the current state of every branch."""
        now = Branch(prompt_ids=self.prompt_ids, path=self.log.path, companions=self.log.companions)
        branches = list(self.branches) or [now]
        branches[self.branch] = now
        return branches

    @property
    def answered_size(self) -> int:
        """Number of tokens in the log up to the end of the last turn that the episode received."""
        return self.answered[-1][1] if self.answered else 0

    @property
    def carried(self) -> bool:
        """Whether the rollout was sent before. Carried rollouts are sent before new ones."""
        return self.log.size > 0 or (self.request is not None and self.request.attempt > 0)


@dataclass(slots=True, kw_only=True)
class Ended:
    """A member of a group whose generation has ended, also after it has left the group."""

    rollout_id: int
    index: int
    tokens: int
    at: float | None = None
    """Time in seconds of the end; None if it was before a restart."""
    scored: bool = False
    reward: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class GroupRecord:
    """The rollouts of one prompt, or one of them that is delivered by itself.

    A sample that is delivered by itself leaves its group for a record of its own, whose id is that
    of the rollout.
    """

    group_id: int
    prompt: Prompt
    source: int | None = None
    """Id of the group that this single sample has left; None for a whole group."""
    siblings: tuple[Sibling, ...] = ()
    """The siblings of this single sample."""
    few: bool = False
    """Whether this single sample has fewer siblings than configured."""
    ended: dict[int, Ended] = field(default_factory=lambda: {})
    """The members whose generation has ended, by rollout id, in the order of these ends; those that
    have left as single samples are included. Empty if whole groups are delivered."""
    samples: int = 0
    """Number of single samples that have left the group and are still in flight."""
    evaluation_id: int | None = None
    size: int = 0
    """Number of members to deliver."""
    members: list[RolloutRecord] = field(default_factory=list["RolloutRecord"])
    lost: int = 0
    """Number of lost members by which the group has shrunk."""
    unfinished: int = 0
    """Number of members that still generate."""
    complete_at: float | None = None
    """Time in seconds when the last response ended; None before that, and if it was before a
    restart."""
    accepted: bool | None = None
    """Whether the group is accepted; None until known."""
    engine: str = ""
    """Engine of a member's latest attempt, which caches the prompt's prefix."""
    opened: int = 0
    """Number of batches before the one in work at the launch."""
    again: int | None = None
    """The group of the same prompt that this one replaces; None for the prompt's first group."""
    first_run: int | None = None
    """Number of batches before the one in work when a member was first chosen to run (length
    buckets); None until then."""
    dropped: Reason | None = None
    """Reason of the drop; None while the group is in flight."""
    offered: bool = False
    """Whether the group is in the offered batch."""
    media_tokens: int = 0
    """Tokens that the prompt's media expand to in an engine, in addition to their placeholders."""

    @property
    def origin(self) -> int:
        """Id of the group as it was launched."""
        return self.group_id if self.source is None else self.source

    @property
    def in_training(self) -> bool:
        """Whether the group is part of training, not of an evaluation, and is not dropped."""
        return self.evaluation_id is None and self.dropped is None

    @property
    def complete(self) -> bool:
        """Whether every member has finished its response."""
        return self.unfinished == 0

    @property
    def scored(self) -> bool:
        """Whether every member has its reward."""
        return self.complete and all(member.state is State.DONE for member in self.members)

    @property
    def oldest_version(self) -> int | None:
        """Oldest version among the sampled tokens of the group; None if there are none."""
        versions = [member.log.oldest_version for member in self.members]
        return min([v for v in versions if v is not None], default=None)

    @property
    def tokens(self) -> int:
        """Number of response tokens of all members."""
        return sum([member.log.size for member in self.members])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeliveredBatch:
    """A batch that the trainer has, or is offered, and has not acknowledged.

    Its groups keep their members, so that a resumed run can deliver it again.
    """

    index: int
    version: int
    oldest_unmasked: int | None
    """Version below which tokens are masked; None if no token is."""
    groups: tuple[GroupRecord, ...]


def group_lengths(record: GroupRecord) -> GroupLengths:
    """Return the response lengths of a group, as evidence for the distribution of lengths.

    They are in the order of the members' indexes, also after some have left as single samples: in
    the order of their ends the first one would be a short one.
    """
    ended = record.ended
    lengths = [
        (m.index, m.log.size, m.state not in GENERATING)
        for m in record.members
        if m.rollout_id not in ended
    ]
    if ended:
        lengths = sorted([*lengths, *[(each.index, each.tokens, True) for each in ended.values()]])
    return GroupLengths(
        launched=record.group_id,
        # A response that ended without a token counts as length 1, the least of the distribution.
        tokens=np.array([max(size, ended) for _, size, ended in lengths], dtype=np.int64),
        finished=np.array([ended for _, _, ended in lengths], dtype=np.bool_),
    )


def member_tokens(groups: Sequence[GroupRecord]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return each member's token count so far, int64 [G, g], and completion, bool [G, g].

    Smaller groups are padded with 0 and True.
    """
    tokens = [[member.log.size for member in group.members] for group in groups]
    finished = [[member.state not in GENERATING for member in g.members] for g in groups]
    return padded(tokens, 0, np.int64), padded(finished, True, np.bool_)
