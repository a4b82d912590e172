"""The data of a saved scheduler, for stores; without process state such as streams and calls.

Records that a store writes field by field are msgspec structs.

Invariant: a :class:`Snapshot` contains every change since the previous one, and is taken between
two events. So a prefix of the snapshots restores the scheduler at the time of its last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec
import numpy as np

from aprilsched.kernel.core.lengths.memory import Remembered
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.core.state.ledger import Counters, Entry
from aprilsched.kernel.core.state.records import Ended
from aprilsched.kernel.values.companions import Rows
from aprilsched.types import (
    Answer,
    FinishReason,
    Float32Array,
    Int32Array,
    Prompt,
    SamplingParams,
    Sibling,
)

SavedRun: TypeAlias = tuple[int, int, str | None]
"""A run of tokens of one version: its end, its version and its engine."""

SavedTurn: TypeAlias = tuple[int, int, FinishReason, int]
"""A finished turn of an episode: start and end of its output, finish reason, number of its
branch."""


class Stage(StrEnum):
    """The progress of a rollout."""

    GENERATING = "generating"
    GENERATED = "generated"
    """The response is finished, and its reward is not known."""
    SCORED = "scored"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenPage:
    """Tokens of many rollouts that arrived between two snapshots.

    Attributes:
        slices: int32 [n, 6], one row for each run of tokens: rollout, position of the first token
            in the response, number of tokens, version, index of the engine in `engines` (-1 for
            none), group.
        engines: names of engines.
        token_ids: ids of all slices, one after the other, int32 [t].
        logprobs: float32 [t].
    """

    slices: Int32Array
    engines: tuple[str, ...]
    token_ids: Int32Array
    logprobs: Float32Array

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedMember:
    """A member of a launched group; it never changes."""

    rollout_id: int
    index: int
    sampling: SamplingParams
    again: int = 0
    """Number of earlier regenerations of this member."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavedGroup:
    """A launched group, or a single sample of one. It changes only when a member leaves, and is
    then saved again."""

    group_id: int
    prompt: Prompt
    opened: int
    members: tuple[SavedMember, ...]
    again: int | None = None
    lost: int = 0
    """Number of lost members by which it has shrunk."""
    source: int | None = None
    """The group that a single sample has left."""
    siblings: tuple[Sibling, ...] = ()
    """The siblings of a single sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupState:
    """The data of a group that changes."""

    group_id: int
    accepted: bool | None = None
    first_run: int | None = None
    ended: tuple[Ended, ...] = ()
    """The members whose generation has ended, in that order, if samples are delivered."""


class SavedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The current request of a rollout."""

    output_start: int
    sampling: SamplingParams
    attempts: int
    failures: int
    interruptions: int


class SavedBranch(msgspec.Struct, frozen=True, kw_only=True):
    """One of several branches of a rollout.

    Attributes:
        path: the parts of its response in the rollout's tokens.
        prompt_ids: the context of its first token.
        of: an earlier branch with the same context, which is then not saved again.
    """

    path: tuple[tuple[int, int], ...]
    prompt_ids: tuple[int, ...] = ()
    of: int | None = None


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a rollout that changes, without its tokens.

    Attributes:
        rewritten: all its tokens are saved again; earlier saved ones are void.
        runs: versions and engines of its tokens at that time. Later tokens have them in their
            slices.
        eligible: the rollout may generate; otherwise it is deferred.
        prompt_ids: the context of its first token, if it is not the group's prompt.
        turns: the finished turns of an episode.
        branches: all of its branches, if there are several.
        branch: the number of the active branch, which later tokens continue.
        foreign: for each companion of each branch (:func:`row_name`) the response tokens whose row
            comes from another forward pass.
    """

    rollout_id: int
    group_id: int
    stage: Stage = Stage.GENERATING
    rewritten: bool = False
    runs: tuple[SavedRun, ...] = ()
    exact: bool = True
    finish_reason: FinishReason = "length"
    reward: float | None = None
    eligible: bool = True
    prompt_ids: tuple[int, ...] | None = None
    turns: tuple[SavedTurn, ...] = ()
    request: SavedRequest | None = None
    stale_keys: bool = False
    reward_parts: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    info: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    foreign: dict[str, list[tuple[int, int]]] = {}
    answers: tuple[Answer, ...] = ()
    branches: tuple[SavedBranch, ...] = ()
    branch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBatch:
    """A batch that the trainer has not acknowledged."""

    index: int
    version: int
    oldest_unmasked: int | None
    group_ids: tuple[int, ...]


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The data of the run itself.

    Attributes:
        last_id: the last id of a group, rollout or request.
        cursor: the number of launched prompts of the source.
        ready: complete groups, in the order of their completion.
        version: the trainer's version.
        evaluating: rollout, group and number of tokens of each rollout of an evaluation. An
            evaluation ends with the call that requested it.
        longest: the largest number of tokens that any response may have.
        process: the name of the process that saved it, in the labels of its weights.
    """

    last_id: int
    cursor: int
    episodes: bool
    ready: tuple[int, ...]
    version: int
    base: int
    adapter: int | None
    counters: Counters
    dropped_rollouts: dict[str, int]
    dropped_tokens: dict[str, int]
    evaluating: tuple[tuple[int, int, int], ...]
    wave_due: bool
    target_groups: int
    longest: int
    batches_since_update: int
    accepts: bool
    """Whether the run filters groups."""
    siblings: int | None = None
    """Number of siblings of a delivered sample; None if the run delivers whole groups."""
    seen_groups: tuple[int, ...] = ()
    """Groups of the batch in work that the trainer may already have."""
    in_parts: bool = False
    """Whether engines may have a mix of two versions."""
    delivered_groups: int = 0
    failed_groups: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Numbers of failed groups by cause."""
    remembered_well: tuple[float, float] = (0.0, 0.0)
    """Quality of predictions from earlier epochs: the sums of the regression."""
    process: str = ""


def row_name(name: str, branch: int) -> str:
    """Return the name under which a branch's rows of a companion are saved."""
    return f"{name}@{branch}" if branch else name


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavedRows:
    """Rows of one companion of one branch of a rollout, from row `start` on.

    The `name` comes from :func:`row_name`.
    """

    group_id: int
    rollout_id: int
    name: str
    start: int
    rows: Rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Snapshot:
    """All changes since the previous snapshot, or the full state.

    Attributes:
        full: this is a full snapshot, and everything saved before it is void.
        schedule: the schedule that automatic over-provisioning has chosen; None without it.
        batches: batches that the trainer has or may have.
        acknowledged: indexes of batches to forget. They are removed before `batches` are added,
            because a new batch may reuse the index of a withdrawn one.
        removed: groups that were dropped, or delivered and acknowledged.
        remembered: changed entries of the memory of prompt lengths, the latest last.
    """

    full: bool
    run: RunState
    schedule: Schedule | None
    page: TokenPage | None
    groups: Sequence[SavedGroup] = ()
    group_states: Sequence[GroupState] = ()
    rollouts: Sequence[RolloutState] = ()
    batches: Sequence[SavedBatch] = ()
    acknowledged: Sequence[int] = ()
    removed: Sequence[int] = ()
    dropped: Sequence[Entry] = ()
    lengths: Sequence[GroupLengths] = ()
    remembered: Sequence[Remembered] = ()
    companions: Sequence[SavedRows] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavedTokens:
    """All tokens of one rollout, int32 [t] and float32 [t], with the runs of their slices.

    With `cut` the store still has later tokens, which are void because earlier ones are damaged.
    """

    token_ids: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    logprobs: Float32Array = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    runs: tuple[SavedRun, ...] = ()
    cut: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Saved:
    """A whole scheduler, as a store returns it.

    `damaged` contains the groups with unreadable data, each with the cause. A rollout whose tokens
    are damaged from some position on is cut off there.
    """

    run: RunState
    schedule: Schedule | None
    groups: Sequence[SavedGroup]
    group_states: dict[int, GroupState]
    rollouts: dict[int, RolloutState]
    tokens: dict[int, SavedTokens]
    batches: Sequence[SavedBatch]
    dropped: Sequence[Entry]
    lengths: Sequence[GroupLengths]
    damaged: dict[int, str]
    remembered: Sequence[Remembered] = ()
    companions: dict[int, list[SavedRows]] = field(default_factory=dict[int, list[SavedRows]])
    first_new_batch: int = 0
    """Index below which the trainer may have batches that the store has lost."""
