"""The data of a saved scheduler, without what only a process can hold (streams, engines, calls).

Invariant: a :class:`Cut` has everything that changed since the one before it, taken between two
events, so the cuts up to any one of them are the scheduler as it was at one moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np

from aprilsched.core.lengths.groups import GroupLengths
from aprilsched.core.policies.schedule import Schedule
from aprilsched.core.state.ledger import Counters, Entry
from aprilsched.types import FinishReason, Float32Array, Int32Array, Prompt, SamplingParams

__all__ = [
    "Cut",
    "GroupState",
    "RolloutState",
    "RunState",
    "Saved",
    "SavedBatch",
    "SavedGroup",
    "SavedMember",
    "SavedRequest",
    "SavedRun",
    "SavedTokens",
    "SavedTurn",
    "Stage",
    "TokenPage",
]

SavedRun: TypeAlias = tuple[int, int, str | None]
"""A run of tokens: its end, its version, its engine."""

SavedTurn: TypeAlias = tuple[int, int, FinishReason]


class Stage(StrEnum):
    """How far a rollout has come."""

    GENERATING = "generating"
    GENERATED = "generated"
    """To its end; its reward is not known."""
    SCORED = "scored"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenPage:
    """Tokens of many rollouts that arrived between two cuts.

    Attributes:
        slices: int32 [n, 5], one row for each run of tokens: rollout, position of its first token
            in the response, tokens, version, place of the engine in `engines` (-1 for none).
        engines: names.
        token_ids: int32 [t], slice after slice.
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
    rollout_id: int
    index: int
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavedGroup:
    """A launched group; nothing of it changes."""

    group_id: int
    prompt: Prompt
    opened: int
    members: tuple[SavedMember, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupState:
    """What changes of a group."""

    group_id: int
    accepted: bool | None = None
    first_run: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRequest:
    """The current request of a rollout."""

    output_start: int
    sampling: SamplingParams
    attempts: int
    failures: int
    breaks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutState:
    """What changes of a rollout, but for its tokens.

    Attributes:
        anew: its tokens are saved from the first one on again; those saved before are void.
        runs: versions and engines of its tokens at the time; tokens beyond are as their slices
            say.
        prompt_ids: the context of its first token, where that is not the group's prompt.
        turns: of each finished turn of an episode, where its output begins and ends, and why.
    """

    rollout_id: int
    group_id: int
    stage: Stage = Stage.GENERATING
    anew: bool = False
    runs: tuple[SavedRun, ...] = ()
    exact: bool = True
    finish_reason: FinishReason = "length"
    reward: float | None = None
    due: bool = True
    prompt_ids: tuple[int, ...] | None = None
    turns: tuple[SavedTurn, ...] = ()
    request: SavedRequest | None = None
    stale_keys: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedBatch:
    """A batch that the trainer has not acknowledged."""

    index: int
    version: int
    oldest_unmasked: int | None
    group_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """What there is once in a run.

    Attributes:
        last_id: of groups, rollouts and requests.
        cursor: prompts of the source that were launched.
        ready: complete groups, in the order of their completion.
        version: the trainer's.
        evaluating: rollout, group and tokens of what evaluations have under way: those end with
            the call that asked for them.
        longest: the most tokens that any response may have.
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
    failed_in_a_row: int
    wave_due: bool
    target_groups: int
    longest: int
    planned_at: int
    planned_for: float | None
    looked_at: int
    batches_since_update: int | None = None
    delivered_since_update: int = 0
    """In groups, as it was written before `batches_since_update`."""
    accepts: bool | None = None
    """Groups were filtered; None where that was not written."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cut:
    """What changed since the cut before; if it is `whole`, everything, and all before is void.

    `batches` are those that the trainer has or may have; numbers in `acknowledged` are forgotten
    before them, since a batch that was withdrawn may be followed by another of its number.
    `removed` are groups that were dropped, or delivered and acknowledged, and all their tokens;
    `schedule` is what was chosen while the run went on, None where nothing is chosen.
    """

    whole: bool
    run: RunState
    schedule: Schedule | None
    page: TokenPage | None
    groups: Sequence[SavedGroup] = ()
    group_states: Sequence[GroupState] = ()
    rollouts: Sequence[RolloutState] = ()
    batches: Sequence[SavedBatch] = ()
    acknowledged: Sequence[int] = ()
    removed: Sequence[tuple[int, int]] = ()
    dropped: Sequence[Entry] = ()
    lengths: Sequence[GroupLengths] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SavedTokens:
    """All tokens of one rollout: int32 [t] and float32 [t], and what their slices say of them."""

    token_ids: Int32Array = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    logprobs: Float32Array = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    runs: tuple[SavedRun, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Saved:
    """A whole scheduler, as a store gives it back.

    `damaged` are groups of which something cannot be read any more, with what is wrong; of a
    rollout whose tokens are damaged from some place on, only those before it are here.
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
