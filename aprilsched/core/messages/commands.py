"""Commands: what the shell is to do. It reports back with events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec import Struct

from aprilsched.companions import Companion
from aprilsched.core.lengths.observed import GroupLengths
from aprilsched.core.policies.schedule import Pace, Schedule
from aprilsched.errors import RunEnded, RunGivenUp
from aprilsched.types import Batch, Float32Array, Group, Int32Array, Prompt, Rollout, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchPrompts:
    """Take `count` prompts from the source. The answer is PromptsArrived."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Launch:
    """The group is in flight from now on. There is nothing to do for the shell.

    Attributes:
        rollout_ids: the group's members, in their order.
        restored: the lengths of the members, where the group is in flight again after the run was
            resumed.
    """

    group_id: int
    rollout_ids: tuple[int, ...]
    prompt: Prompt
    evaluation_id: int | None = None
    restored: GroupLengths | None = None


# --- requests --------------------------------------------------------------------------------


class Send(Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """Send an attempt of a request to an engine.

    Attributes:
        input_ids: the prompt and all tokens known so far, int32 [n].
        adapter: the version of the LoRA adapter to sample with; None for the model itself.
        cache_version: cached KV is shared only among requests with the same value; None shares
            with all.
        companions: what the engine is to return beside the tokens, with the first position of the
            context whose row is missing.
    """

    engine: str
    request_id: int
    attempt: int
    rollout_id: int
    group_id: int
    input_ids: Int32Array
    sampling: SamplingParams
    adapter: int | None = None
    cache_version: int | None = None
    companions: tuple[tuple[Companion, int], ...] = ()


class Abort(Struct, frozen=True, kw_only=True, gc=False):
    """End an attempt early. It comes back as Interrupted, or as Finished if it ended first."""

    engine: str
    request_id: int
    attempt: int


# --- engine control --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    """Pause the engine. The answer is Paused.

    With "retract" the engine takes its requests out of the batch and recomputes them later; with
    "in_place" it stops them where they are, with their KV.
    """

    engine: str
    mode: Literal["retract", "in_place"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flush:
    """Flush the KV cache of a paused engine. The answer is Flushed."""

    engine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Ask the engine which version it has. The answer is Verified.

    The engine has been without requests for a while, or a connection to it broke. It may have been
    restarted with other weights since then, so nothing is sent to it before the answer. With
    `generates` it must also generate a few tokens, because it has failed requests that may be at
    fault themselves.
    """

    engine: str
    generates: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Refit:
    """Bring `version` into these engines. Each of them answers with Refitted.

    Attributes:
        adapter: the version is an adapter, which is loaded while the engines run.
        external: somebody else has loaded the version; the engines are only asked for it. Without
            `adapter` and `external` all of these engines are paused.
        followed: with `external`, nobody has asked for the version: some engine has shown it.
        catch_up: the version is the fleet's already, and is published again for an engine on
            standby.
    """

    version: int
    engines: tuple[str, ...]
    adapter: bool = False
    external: bool = False
    followed: bool = False
    catch_up: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Retire:
    """Unload an adapter from the engine: nothing samples with it there any more."""

    engine: str
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Release the memory of `tags`, which goes to the trainer. The engine is paused. The answer is
    Released."""

    engine: str
    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wake:
    """Take the memory of `tags` back. The answer is Woken."""

    engine: str
    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Continue:
    """End the pause of the engine. The answer is Continued."""

    engine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoseEngine:
    """The engine is out of use: end its streams, and report the cause.

    Attributes:
        last: no engine is left, neither in use nor on standby.
        standby: the engine answers, and comes back into use with the next refit that reaches it.
            Otherwise it is quarantined.
    """

    engine: str
    cause: str
    last: bool
    standby: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmitEngine:
    """The engine is in use from now on, because it has the fleet's version."""

    engine: str
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSlow:
    """Report that the engine is slow. It stays in use, because there is no other engine to compare
    it with."""

    engine: str
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitFleet:
    """No engine is left: wait for one of those that were lost last, which are named with causes."""

    lost: tuple[tuple[str, str], ...]
    waited_s: float
    left_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUpFleet:
    """No engine came back in time: tell everybody who waits, now or later."""

    lost: tuple[tuple[str, str], ...]
    waited_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WantUpdate:
    """Tell the caller to publish a version: only these engines are there, and none of them has the
    fleet's weights.

    Attributes:
        version: the fleet's version.
        batch: the caller waits for a batch, and is told.
        evaluations: evaluations that are abandoned, whose callers are told.
        base: the version of the full model that the fleet's adapters belong to; None if its
            weights are no adapter.
    """

    engines: tuple[str, ...]
    version: int
    batch: bool
    evaluations: tuple[int, ...]
    base: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishUpdate:
    """The update is over.

    Attributes:
        failed: engines that did not take the version, each with the cause.
        cause: empty on success. Otherwise no engine took the version, and the engines that have
            the old version go on under it.
    """

    version: int
    failed: tuple[tuple[str, str], ...] = ()
    cause: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishSleep:
    """A sleep has begun (`asleep`): every engine's memory is the trainer's. Or it has ended: every
    engine has its memory back."""

    asleep: bool


# --- episodes and rewards --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StartEpisode:
    """Start the coroutine of an episode."""

    rollout_id: int
    index: int
    prompt: Prompt
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResolveTurn:
    """Give an episode the answer to its turn.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n].
        versions: int32 [n].
        withdrawn: the episode withdrew the turn, and these are the tokens generated until then.
    """

    rollout_id: int
    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish_reason: Literal["stop", "length"]
    withdrawn: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreRollout:
    """Ask the reward function about one rollout. The answer is Rewarded or RewardFailed."""

    rollout: Rollout
    prompt: Prompt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreGroup:
    """Ask the reward function about a whole group. The answer is GroupRewarded or RewardFailed."""

    group: Group


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Filter:
    """Ask the user's accept function about a scored group.

    The answer is Filtered or RewardFailed.
    """

    group: Group


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelWork:
    """Cancel the episodes and rewards of these rollouts: their group was dropped.

    `culprit` is the rollout whose failure took the others along, if one did.
    """

    group_id: int
    rollout_ids: tuple[int, ...]
    reason: str
    cause: str
    culprit: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """Tell the caller that the run is given up, because `groups` groups failed in a row."""

    groups: int
    cause: str
    error: RunGivenUp


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Choose a schedule on this evidence. The answer is Planned.

    Attributes:
        batch_groups: the number of groups that a batch is expected to take.
        group_size: the number of rollouts of each prompt; None if prompts differ in that, as those
            of the lengths do.
        ended: lengths of the groups that have ended and were launched last.
        open: lengths so far of the groups that are being generated.
        prompt_tokens: the mean length of the prompts of the last responses.
        engines: the number of engines in use.
        kv_tokens: the tokens that all their KV pools hold; None if an engine does not report it.
        current: the schedule in force.
        paces: the paces that a schedule may have, where the pace is chosen too; empty where it is
            the configured one.
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
    train_seconds: float | None = None
    train_spread: float = 0.0
    train_early: float = 0.0
    refit_seconds: float | None = None
    most_tokens: int | None = None
    remembered: float = 0.0


# --- the trainer -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Offer:
    """Save the batch, then let the trainer take it. The answer is BatchTaken. No other batch is
    offered before that, unless this one is withdrawn. A part of a batch that is not ``complete``
    need not be saved."""

    offered: Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class WithdrawOffer:
    """Take the offer back: the trainer must not take the batch any more, because a new version
    comes."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Deliver:
    """The trainer has taken the batch."""

    batch: Batch
    unsaved: bool = False
    """It was taken group by group and has ended early, so no offer of it as a whole was saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfPrompts:
    """Tell the trainer that the prompts have ended, and how the run has gone."""

    error: RunEnded


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeliverEvaluation:
    """Give the caller the answers to its evaluation."""

    evaluation_id: int
    batch: Batch


Command: TypeAlias = (
    FetchPrompts
    | Launch
    | Send
    | Abort
    | Pause
    | Flush
    | Refit
    | Retire
    | Release
    | Wake
    | Continue
    | Verify
    | LoseEngine
    | AdmitEngine
    | ReportSlow
    | AwaitFleet
    | GiveUpFleet
    | WantUpdate
    | FinishUpdate
    | FinishSleep
    | StartEpisode
    | ResolveTurn
    | ScoreRollout
    | ScoreGroup
    | Filter
    | CancelWork
    | GiveUp
    | Plan
    | Offer
    | WithdrawOffer
    | Deliver
    | EndOfPrompts
    | DeliverEvaluation
)
