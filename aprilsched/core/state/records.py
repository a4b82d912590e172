"""The mutable records behind one rollout, its current request and its group.

A request belongs to a rollout and may take several attempts: each time it is sent is one.
A rollout has at most one open request; a rollout of several turns has one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aprilsched.core.lengths.groups import GroupLengths
from aprilsched.core.state.ledger import Reason
from aprilsched.core.state.lifecycle import GENERATING, Move, State, after
from aprilsched.core.state.token_log import TokenLog
from aprilsched.types import FinishReason, Int32Array, Prompt, SamplingParams

__all__ = ["GroupRecord", "Refusal", "Replay", "RequestRecord", "RolloutRecord", "group_lengths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An engine did not take a request: its fault, if another one takes it."""

    engine: str
    sent: int
    """Which of all attempts, in the order of sending, it was."""
    cause: str


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One generation request.

    `output_start` and `attempt_start` are positions in the rollout's token log: where the
    output of the request, and that of its current attempt, begins.
    """

    request_id: int
    rollout: RolloutRecord
    sampling: SamplingParams
    output_start: int
    attempt: int = 0
    attempt_start: int = 0
    open: bool = False
    """An attempt is with an engine and has not come back."""
    engine: str = ""
    sent: int = 0
    """Which of all attempts, in the order of sending, the latest is."""
    version: int = 0
    """Under which the attempt samples now."""
    sent_version: int = 0
    """Under which it was sent."""
    adapter: int | None = None
    """The version of the adapter that it samples with."""
    crossed: bool = False
    """The engine was refitted during the attempt."""
    unsure: bool = False
    """Tokens have come since then: until the engine reports the attempt's versions, it is not known
    which of them were sampled before."""
    kept_keys: bool = False
    """And kept the attempt's KV, which the weights before had computed."""
    failures: int = 0
    """Attempts in a row that failed without a new token."""
    interruptions: int = 0
    """Attempts that failed after new tokens, or went down with their engine."""
    avoid: frozenset[str] = frozenset()
    """The engines on which it failed since its last new token."""
    refusal: Refusal | None = None
    """By the first engine that did not take it, while another may."""
    aborting: bool = False
    prefill_due: int = 0
    """Context tokens that the engine computes again before the attempt's next chunk."""

    @property
    def generated(self) -> int:
        return len(self.rollout.log) - self.output_start

    @property
    def gained(self) -> bool:
        """The attempt has brought new tokens."""
        return len(self.rollout.log) > self.attempt_start

    @property
    def remaining(self) -> int:
        return self.sampling.max_new_tokens - self.generated

    def shun(self, engine: str) -> None:
        """The attempt that has just been closed failed on `engine`."""
        before = frozenset[str]() if self.gained else self.avoid
        self.avoid = before | {engine}


@dataclass(slots=True, kw_only=True)
class Replay:
    """How far an episode that was begun anew has asked again for the turns that are known."""

    answered: int = 0
    """Turns given to it again."""
    partial: int | None = None
    """Where the output of the turn begins that was not finished; None if there was none."""


@dataclass(slots=True, kw_only=True, eq=False)
class RolloutRecord:
    """One rollout on its way."""

    rollout_id: int
    index: int
    group: GroupRecord
    sampling: SamplingParams
    state: State
    prompt_ids: Int32Array
    log: TokenLog = field(default_factory=TokenLog)
    request: RequestRecord | None = None
    turns: int = 0
    eligible: bool = True
    """It may generate now; otherwise it is deferred until its group is chosen."""
    reward: float | None = None
    finish_reason: FinishReason = "length"
    answered: list[tuple[int, int, FinishReason]] = field(
        default_factory=list[tuple[int, int, FinishReason]]
    )
    """The output of each turn that an episode was given: where it begins and ends, and why."""
    replay: Replay | None = None
    """The episode was begun anew, and asks for what it was given before."""
    undecided: int | None = None
    """Where the tokens of a turn begin that the episode gave up and has not looked at."""
    rewritten: bool = False
    """What a cut has is void."""

    def move(self, move: Move) -> None:
        """Make a move of the life-cycle table."""
        self.state = after(self.state, move)

    def context(self) -> Int32Array:
        """Prompt and response so far, int32 [P + T], as the engine must see it."""
        return self.log.after(self.prompt_ids)

    @property
    def carried(self) -> bool:
        """It was sent before, so it goes before those that were not."""
        return len(self.log) > 0 or (self.request is not None and self.request.attempt > 0)


@dataclass(slots=True, kw_only=True, eq=False)
class GroupRecord:
    """The rollouts of one prompt."""

    group_id: int
    prompt: Prompt
    evaluation_id: int | None = None
    members: list[RolloutRecord] = field(default_factory=list["RolloutRecord"])
    unfinished: int = 0
    """Members still generating."""
    unscored: int = 0
    accepted: bool | None = None
    """The verdict; None until it is known."""
    engine: str = ""
    """Where the group's prompt prefix is cached."""
    opened: int = 0
    """Batches that had been delivered when it was launched."""
    first_run: int | None = None
    """And when a member of it was first chosen to run; None before."""
    dropped: Reason | None = None
    offered: bool = False
    """It is in the batch that is offered."""

    @property
    def complete(self) -> bool:
        """Every member is generated to its end."""
        return self.unfinished == 0

    @property
    def oldest_version(self) -> int | None:
        """The oldest version among all tokens of the group."""
        versions = (member.log.oldest_version for member in self.members)
        return min((v for v in versions if v is not None), default=None)

    @property
    def tokens(self) -> int:
        return sum(len(member.log) for member in self.members)


def group_lengths(record: GroupRecord) -> GroupLengths:
    """The lengths of a group that is in flight."""
    return GroupLengths(
        launched=record.group_id,
        # A response that ended with nothing has the length 1: a law of lengths begins there.
        tokens=np.array(
            [max(len(m.log), m.state not in GENERATING) for m in record.members], dtype=np.int64
        ),
        finished=np.array([m.state not in GENERATING for m in record.members], dtype=np.bool_),
    )
