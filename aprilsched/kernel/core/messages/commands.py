"""Commands: what the shell is to do. It reports back with events.

Some facts are commands too (:class:`~aprilsched.kernel.core.messages.facts.Order`): the shell acts
on what has become true, and needs to know no more than the listeners do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from aprilsched.errors import RunEnded, RunGivenUp
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.kernel.core.policies.schedule import Pace, Schedule
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
)


class Command(Struct, frozen=True, kw_only=True):
    """Something that the shell is to do."""


# --- requests --------------------------------------------------------------------------------


class Send(Command, frozen=True, eq=False, gc=False):
    """Send an attempt of a request to an engine.

    Attributes:
        input_ids: the prompt and all tokens known so far, int32 [n].
        adapter: the version of the LoRA adapter to sample with; None for the model itself.
        cache_key: cached KV is shared only among requests of this run with the same value; None
            shares with all.
        companions: what the engine is to return beside the tokens, with the first position of the
            context whose row is missing.
        media: those of the prompt; their placeholders in `input_ids` are not expanded.
        rank: what has a lower one should run first inside the engine.
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
    """End an attempt early. It comes back as Interrupted, or as Finished if it ended first."""

    engine: str
    request_id: int
    attempt: int


# --- engine control --------------------------------------------------------------------------


class Pause(Command, frozen=True):
    """Pause the engine. The answer is Paused.

    With "retract" the engine takes its requests out of the batch and recomputes them later; with
    "in_place" it stops them where they are, with their KV.
    """

    engine: str
    mode: Literal["retract", "in_place"]


class Flush(Command, frozen=True):
    """Flush the KV cache of a paused engine. The answer is Flushed."""

    engine: str


class Verify(Command, frozen=True):
    """Ask the engine which version it has. The answer is Verified.

    The engine has been without requests for a while, or a connection to it broke. It may have been
    restarted with other weights since then, so nothing is sent to it before the answer. With
    `generates` it must also generate a few tokens, because it has failed requests that may be at
    fault themselves.
    """

    engine: str
    generates: bool = False


class Release(Command, frozen=True):
    """Release the memory of `tags`, which goes to the trainer. The engine is paused. The answer is
    Released."""

    engine: str
    tags: tuple[str, ...]


class Wake(Command, frozen=True):
    """Take the memory of `tags` back. The answer is Woken."""

    engine: str
    tags: tuple[str, ...]


class Continue(Command, frozen=True):
    """End the pause of the engine. The answer is Continued."""

    engine: str


# --- episodes and rewards --------------------------------------------------------------------


def context_mark(input_ids: Int32Array) -> tuple[int, int]:
    """What a context, int32 [n], is known by within one process."""
    return len(input_ids), hash(input_ids.tobytes())


class StartEpisode(Command, frozen=True, eq=False):
    """Start the coroutine of an episode. `known` has the marks of the contexts of its turns that
    are known from before the run was resumed, and `begun` that of the one of which only the first
    tokens may be known."""

    rollout_id: int
    index: int
    prompt: Prompt
    sampling: SamplingParams
    known: tuple[tuple[int, int], ...] = ()
    begun: tuple[int, int] | None = None


class ResolveTurn(Command, frozen=True, eq=False):
    """Give an episode the answer to its turn.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n].
        versions: int32 [n].
        withdrawn: the episode withdrew the turn, and these are the tokens generated until then.
        companions: the rows of the whole context up to the turn's last token, by name.
        refused: why the engines refuse the request, which then has no tokens; empty if they do not.
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
    """Ask the reward function about one rollout. The answer is Rewarded or RewardFailed."""

    rollout: Rollout
    prompt: Prompt


class ScoreGroup(Command, frozen=True, eq=False):
    """Ask the reward function about a whole group. The answer is GroupRewarded or RewardFailed."""

    group: Group


class Filter(Command, frozen=True, eq=False):
    """Ask the user's accept function about a scored group.

    The answer is Filtered or RewardFailed.
    """

    group: Group


class GiveUp(Command, frozen=True):
    """Tell the caller that the run is given up, because too many groups failed in a row."""

    error: RunGivenUp


class Plan(Command, frozen=True, eq=False):
    """Choose a schedule on this evidence. The answer is Planned.

    Attributes:
        batch_groups: the number of groups that a batch is expected to take.
        group_size: the number of rollouts of each prompt; None if prompts differ in that, as those
            of the lengths do.
        ended: lengths of the groups that have ended and were launched last.
        open: lengths so far of the groups that are being generated.
        prompt_tokens: the mean length of the prompts of the last responses.
        spare_tokens: the mean number of tokens that these responses could have had beyond their
            ends; None where the engines keep no room for what requests may generate.
        engines: the number of engines in use.
        kv_tokens: the tokens that all their KV pools hold; None if an engine does not report it.
        current: the schedule in force.
        paces: the paces that a schedule may have, where the pace is chosen too; empty where it is
            the configured one.
        places: whether a schedule may name the placement too.
        train_seconds: the mean time for which the trainer trains on a batch, over the last ones,
            without its waits for batches, groups, updates and evaluations; None while it is
            unknown.
        train_spread: the standard deviation of these times, in seconds.
        train_early: the share of that time for which the trainer trains before it has the last
            group of the batch, 0 to 1; 0 where it takes whole batches.
        refit_seconds: the mean time from the moment in which the engines are ready for new weights
            until all have them, over the last updates, and until one has them with rolling refits;
            None while it is unknown.
        most_tokens: the most tokens that any response so far may have; None if that is not known.
        remembered: the share of the variance common to a prompt's log lengths that earlier epochs
            are expected to explain, as a mean over the groups in flight; 0 where they say nothing.
        reward_seconds: times from the end of a group's last response until the group is accepted
            or refused, in seconds: the means of equal parts of those of the last groups, in
            ascending order; empty where all are 0.
        accepted: a number of tokens of a group, the share of the groups with at most so many that
            is accepted, and the share of the longer ones; 0, 1 and 1 where all are.
        gaps: the mean number of gaps between the turns of a response.
        gap_seconds: the times of such gaps, as `reward_seconds`; empty where there are none.
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
    spare_tokens: float | None = None
    train_seconds: float | None = None
    train_spread: float = 0.0
    train_early: float = 0.0
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
    """Save the batch, then let the trainer take it. The answer is BatchTaken. No other batch is
    offered before that, unless this one is withdrawn. A part of a batch that is not ``complete``
    need not be saved."""

    offered: Batch


class WithdrawOffer(Command, frozen=True):
    """Take the offer back: the trainer must not take the batch any more, because a new version
    comes."""

    index: int


class Deliver(Command, frozen=True, eq=False):
    """The trainer has taken the batch."""

    batch: Batch
    unsaved: bool = False
    """It was taken group by group and has ended early, so no offer of it as a whole was saved."""


class EndOfPrompts(Command, frozen=True):
    """Tell the trainer that the prompts have ended, and how the run has gone."""

    error: RunEnded


class DeliverEvaluation(Command, frozen=True, eq=False):
    """Give the caller the answers to its evaluation."""

    evaluation_id: int
    batch: Batch
