"""Commands: instructions to the shell, which reports back with events.

Some facts are commands too (:class:`~aprilsched.kernel.core.messages.facts.Order`), if the shell
acts on the fact and needs no more data than the listeners.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from aprilsched.errors import ConfigError, RunEnded, RunGivenUp
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.policies.schedule import Pace, Schedule
from aprilsched.kernel.values.capabilities import Reservation
from aprilsched.kernel.values.companions import Companion, CompanionRows
from aprilsched.types import (
    Batch,
    Float32Array,
    Group,
    Int32Array,
    Media,
    Prompt,
    Rollout,
    SamplingParams,
    Unit,
)


class Command(Struct, frozen=True, kw_only=True):
    """An instruction to the shell."""


# --- requests --------------------------------------------------------------------------------


class Send(Command, frozen=True, eq=False, gc=False):
    """Send an attempt of a request to an engine.

    Attributes:
        input_ids: the prompt and all tokens known so far, int32 [n].
        adapter: the version of the LoRA adapter to sample with; None for the model itself.
        cache_key: cached KV is shared only among requests of this run with the same value; None
            shares with all.
        companions: data that the engine should return in addition to the tokens, each with the
            first position of the context whose row is missing.
        media: the media of the context; their placeholders in `input_ids` are not expanded.
        rank: priority inside the engine; requests with a lower rank should run first.
    """

    engine: str
    request_id: int
    attempt: int
    rollout_id: int
    group_id: int
    input_ids: Int32Array
    sampling: SamplingParams
    adapter: int | None = None
    cache_key: str | None = None
    companions: tuple[tuple[Companion, int], ...] = ()
    media: tuple[Media, ...] = ()
    rank: int = 0


class Abort(Command, frozen=True, gc=False):
    """Abort an attempt. The answer is Interrupted, or Finished if the attempt ended first."""

    engine: str
    request_id: int
    attempt: int


# --- engine control --------------------------------------------------------------------------


class Pause(Command, frozen=True):
    """Pause the engine. The answer is Paused.

    With "retract" the engine removes its requests from the batch and recomputes them later; with
    "in_place" it stops them as they are, with their KV.
    """

    engine: str
    mode: Literal["retract", "in_place"]


class Flush(Command, frozen=True):
    """Flush the KV cache of a paused engine. The answer is Flushed."""

    engine: str


class Verify(Command, frozen=True):
    """Query the engine's version. The answer is Verified.

    An engine that was idle for a while, or whose connection broke, may have restarted with other
    weights, so it gets no requests before the answer. With `generates` it must also generate a few
    tokens, because it has failed requests that may be at fault themselves.
    """

    engine: str
    generates: bool = False


class Release(Command, frozen=True):
    """Release the memory of `tags` of a paused engine for the trainer. The answer is Released."""

    engine: str
    tags: tuple[str, ...]


class Wake(Command, frozen=True):
    """Reclaim the memory of `tags`. The answer is Woken."""

    engine: str
    tags: tuple[str, ...]


class Continue(Command, frozen=True):
    """End the pause of the engine. The answer is Continued."""

    engine: str


# --- episodes and rewards --------------------------------------------------------------------


def context_mark(input_ids: Int32Array) -> tuple[int, int]:
    """Return a fingerprint of a context, int32 [n], that is valid within one process."""
    return len(input_ids), hash(input_ids.tobytes())


class StartEpisode(Command, frozen=True, eq=False):
    """Start the coroutine of an episode.

    In a resumed run `known` contains the marks (:func:`context_mark`) of the contexts of turns that
    are already known, and `begun` the mark of a turn of which only the first tokens may be known.
    """

    rollout_id: int
    index: int
    prompt: Prompt
    sampling: SamplingParams
    known: tuple[tuple[int, int], ...] = ()
    partial_turn: tuple[int, int] | None = None


class ResolveTurn(Command, frozen=True, eq=False):
    """Return the answer of a turn to its episode.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n].
        versions: int32 [n].
        withdrawn: the episode withdrew the turn, and these are the tokens generated until then.
        companions: the rows of the whole context up to the turn's last token, by name.
        refused: why the engines refuse the request, which then has no tokens; empty if accepted.
    """

    rollout_id: int
    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish_reason: Literal["stop", "length"]
    withdrawn: bool = False
    companions: Mapping[str, CompanionRows] = {}
    refused: str = ""


class ScoreRollout(Command, frozen=True, eq=False):
    """Score one rollout with the reward function. The answer is Rewarded or RewardFailed."""

    rollout: Rollout
    prompt: Prompt


class ScoreGroup(Command, frozen=True, eq=False):
    """Score a group with the reward function. The answer is GroupRewarded or RewardFailed."""

    group: Group


class Filter(Command, frozen=True, eq=False):
    """Filter a scored group, or a sample with its siblings, with the user's accept function.

    The answer is Filtered or RewardFailed.
    """

    unit: Unit


class GiveUp(Command, frozen=True):
    """End the run: too many units failed in a row, or the refill rule starts too little."""

    error: RunGivenUp | ConfigError


class Plan(Command, frozen=True, eq=False):
    """Choose a schedule on this evidence. The answer is Planned.

    Attributes:
        batch_groups: the expected number of groups in a batch.
        group_size: the number of rollouts of each prompt; None if it varies between prompts, as in
            the lengths.
        ended: lengths of the ended groups that were launched last.
        open: lengths so far of the groups that still generate.
        prompt_tokens: the mean prompt length of the latest responses.
        spare_tokens: the mean number of tokens left to the limit when these responses ended.
        reservation: the room that the engines leave for tokens to come, with `fixed_in_full` only
            if requests have ``ignore_eos``; None if they leave none.
        engines: the number of engines in use.
        kv_tokens: the total size of their KV pools in tokens; None if an engine does not report it.
        current: the schedule in force.
        paces: the paces that a schedule may have, if the pace is chosen too; empty if it is the
            configured one.
        places: whether a schedule may choose the placement too.
        train_seconds: the trainer's mean training time per batch, over the latest batches, without
            its waits for batches, groups, updates and evaluations; None while unknown.
        train_spread: the standard deviation of these times, in seconds.
        refit_seconds: the mean time from engines ready for new weights until all have them, over
            the latest updates; with rolling refits, until one engine has them. None while unknown.
        most_tokens: the largest number of tokens that any response so far may have; None if
            unknown.
        remembered: the share of the variance common to a prompt's log lengths that earlier epochs
            are expected to explain, as a mean over the groups in flight; 0 without earlier epochs.
        reward_seconds: times in seconds from a group's last response until the group is accepted
            or rejected: means of equal parts of the latest groups, in ascending order; empty if all
            are 0.
        accepted: a number of tokens, the acceptance rate of groups with at most that number, and
            the rate of longer groups; 0, 1 and 1 if all groups are accepted.
        gaps: the mean number of gaps between the turns of a response.
        gap_seconds: the times of such gaps, in the form of `reward_seconds`; empty without gaps.
        end_seconds: the times from the last turn of a response until its episode returns, likewise.
    """

    batch_groups: int
    group_size: int | None
    ended: tuple[GroupLengths, ...]
    open: tuple[GroupLengths, ...]
    prompt_tokens: float
    engines: int
    kv_tokens: int | None
    current: Schedule
    paces: tuple[Pace, ...] = ()
    places: bool = False
    spare_tokens: float = 0.0
    reservation: Reservation | None = None
    train_seconds: float | None = None
    train_spread: float = 0.0
    refit_seconds: float | None = None
    most_tokens: int | None = None
    remembered: float = 0.0
    reward_seconds: tuple[float, ...] = ()
    accepted: tuple[float, float, float] = (0.0, 1.0, 1.0)
    gaps: float = 0.0
    gap_seconds: tuple[float, ...] = ()
    end_seconds: tuple[float, ...] = ()


# --- the trainer -----------------------------------------------------------------------------


class Offer(Command, frozen=True, eq=False):
    """Save the batch, then let the trainer take it. The answer is BatchTaken.

    No other batch is offered before the answer, unless this one is withdrawn. A part of a batch
    that is not ``complete`` need not be saved.
    """

    offered: Batch


class WithdrawOffer(Command, frozen=True):
    """Withdraw the offer, so that the trainer cannot take the batch before a new version."""

    index: int


class Deliver(Command, frozen=True, eq=False):
    """Return the batch, which the trainer has accepted, from the trainer's call.

    Attributes:
        unsaved: whether the store has no record of the whole batch, because the trainer took it
            group by group and it ended early.
    """

    batch: Batch
    unsaved: bool = False


class EndOfPrompts(Command, frozen=True):
    """Report to the trainer that the prompts have ended, with the outcome of the run."""

    error: RunEnded


class DeliverEvaluation(Command, frozen=True, eq=False):
    """Return the responses of an evaluation to the caller."""

    evaluation_id: int
    batch: Batch
