"""Events: the inputs of the core. The shell turns every answer, error and trainer call into one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec import Struct

from aprilsched.kernel.core.policies.schedule import Schedule
from aprilsched.kernel.values.capabilities import Capabilities
from aprilsched.kernel.values.companions import Rows
from aprilsched.types import (
    Answer,
    BranchRule,
    EpisodeWait,
    FinishReason,
    Float32Array,
    Int32Array,
    Media,
    Prompt,
    RefusedPrompt,
    SamplingParams,
    Score,
    VersionSpan,
)

ControlCall: TypeAlias = Literal["pause", "flush", "refit", "release", "wake", "continue", "verify"]


class Event(Struct, frozen=True, kw_only=True):
    """An input of the core.

    Events, commands and facts are msgspec structs, because the construction of one takes a quarter
    of the time of a frozen dataclass.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """The properties of an engine when it joins.

    It must be running and, if a refit flushes its cache, flushed.

    Attributes:
        version: the version of its weights; None if they are inconsistent.
        able: what it reported when it was opened.
    """

    name: str
    version: int | None
    able: Capabilities


# --- the trainer -----------------------------------------------------------------------------


class Opened(Event, frozen=True):
    """The fleet is up, and all engines have the same policy version. In a resumed run some or all
    engines may have another version than the run.

    `republishable`: the run's version can be published again.
    """

    engines: tuple[EngineInfo, ...]
    republishable: bool = False


class BatchRequested(Event, frozen=True):
    """The trainer requests its next batch, or the rest of one that it takes group by group."""

    streamed: bool = False
    """The trainer takes the groups of the batch one by one, as soon as they are accepted."""


class BatchWithdrawn(Event, frozen=True):
    """The trainer no longer waits for a batch, because its call was cancelled. The batch stays in
    work, or offered, for the next call."""


class BatchTaken(Event, frozen=True):
    """The trainer has taken the offered batch, which is now delivered. A part of a streamed batch
    that is not the last one is only recorded."""

    index: int


class BatchesAcknowledged(Event, frozen=True):
    """The trainer is done with these batches: they need not be delivered again after a restart."""

    batches: tuple[int, ...]


class TrainerReturned(Event, frozen=True):
    """The trainer has reconnected, or another trainer has replaced it.

    It has `batches` of the unacknowledged batches, and the others are delivered to it again.
    Without a store the scheduler knows of none. If it takes a batch group by group, it has the
    groups `groups` and gets the others.
    """

    batches: tuple[int, ...]
    groups: tuple[int, ...] = ()


class LogprobDifferences(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Differences d of the trainer's log-probabilities of some tokens from the engines', in nats.
    `total` is the sum of d, `k3` the sum of exp(d) - 1 - d, `largest` the largest magnitude of d,
    and `beyond` the number of tokens whose magnitude is above the bound."""

    tokens: int = 0
    total: float = 0.0
    k3: float = 0.0
    largest: float = 0.0
    beyond: int = 0


class LogprobComparison(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Comparison of the trainer's log-probabilities of a batch, computed with the weights of
    `version`, with the engines'. `by_engine` and `by_position` cover the tokens of staleness 0,
    `by_staleness` all tokens. Entry i of `by_position` covers the positions 2**i to 2**(i + 1) - 1
    in the response, counted from 1. The last entry of `by_staleness` covers all older tokens.
    Tokens are `skipped` if their version is uncertain or they attend to keys of older weights, and
    `not_finite` if a log-probability is NaN or infinite. `bound` is a magnitude in nats, see
    :class:`LogprobDifferences`."""

    batch: int
    version: int
    bound: float
    by_engine: dict[str, LogprobDifferences]
    by_position: tuple[LogprobDifferences, ...]
    by_staleness: tuple[LogprobDifferences, ...]
    skipped: int = 0
    not_finite: int = 0


class LogprobsReported(Event, frozen=True):
    """The trainer has computed the log-probabilities of a batch, and they were compared."""

    comparison: LogprobComparison


class EvaluationRequested(Event, frozen=True):
    """The trainer requests responses to these prompts. All are finished, and none is
    over-provisioned or carried."""

    evaluation_id: int
    prompts: tuple[Prompt, ...]
    group_size: int


class EvaluationWithdrawn(Event, frozen=True):
    """The trainer no longer waits for the evaluation, because its call was cancelled."""

    evaluation_id: int


class UpdateRequested(Event, frozen=True):
    """The trainer has a new policy version for the engines.

    Attributes:
        adapter: the version is an adapter, which is loaded while the engines run.
        external: another process has already loaded the version into the engines. They are only
            queried for it, and not paused.
        labelled: with `external`, engines reported the version from its first token on. Otherwise
            it is unknown which version sampled the tokens in flight.
        republishable: while it is the fleet's version, it can be published again to an engine that
            rejoins.
        acknowledges: batches that the trainer has learned from. After the update they need not be
            delivered again.
    """

    version: int
    adapter: bool = False
    external: bool = False
    labelled: bool = True
    republishable: bool = False
    acknowledges: tuple[int, ...] = ()


class PartsFollow(Event, frozen=True):
    """The weights of the next update reach the engines in parts: tensors, a broadcast, or calls of
    the trainer. Until an update has succeeded, an engine may have parts of two versions under the
    label of the older one."""


class UpdateWithdrawn(Event, frozen=True):
    """The trainer's call for the update was cancelled."""

    version: int


class SleepRequested(Event, frozen=True):
    """The trainer requests the engines' memory of these `tags`."""

    tags: tuple[str, ...]


class WakeRequested(Event, frozen=True):
    """The trainer returns the engines' memory."""


class HoldChanged(Event, frozen=True):
    """The trainer wants the engines paused (`held`), with requests waiting inside them, or running
    again. Updates are still carried out while held. A repeated event changes nothing."""

    held: bool


class GroupWithdrawn(Event, frozen=True):
    """The group is no longer needed. Ignored if the group has left flight or is in an offered
    batch."""

    group_id: int
    cause: str


class Planned(Event, frozen=True):
    """The answer to Plan. With None the schedule in force stays; `cause` is the error, if any."""

    schedule: Schedule | None
    cause: str = ""


class PromptsArrived(Event, frozen=True):
    """The answer to FetchPrompts. `last`: the source has ended. `partial`: the source has no more
    prompts at the moment, and the rest follows later."""

    prompts: tuple[Prompt | RefusedPrompt, ...]
    last: bool = False
    partial: bool = False


# --- requests --------------------------------------------------------------------------------


class Progress(Event, frozen=True, eq=False, gc=False):
    """New tokens of an attempt have arrived.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n].
        label: the version that the engine reported with them; None if it reported none, or if the
            spans at the attempt's end report the version of each token.
        rows: the rows of these tokens, for each companion of tokens.
        prompt_tokens: the length of the attempt's context with its media expanded, in tokens; None
            without media.
        decode_seconds: the time since the first of these tokens, if they are the first after a
            prefill; None if the engine does not report it.
    """

    request_id: int
    attempt: int
    token_ids: Int32Array
    logprobs: Float32Array
    label: int | None = None
    rows: Mapping[str, Rows] | None = None
    prompt_tokens: int | None = None
    decode_seconds: float | None = None


class Finished(Event, frozen=True, gc=False):
    """An attempt has finished.

    Attributes:
        spans: the versions of the attempt's output, as the engine reports them; None if it does
            not.
        rows: the new rows of each companion of the context.
        answer: other fields of the engine's answer that are kept.
    """

    request_id: int
    attempt: int
    reason: FinishReason
    spans: tuple[VersionSpan, ...] | None = None
    rows: Mapping[str, Rows] | None = None
    answer: Answer | None = None


class Interrupted(Event, frozen=True, gc=False):
    """An attempt ended early: it was aborted, or never sent. Its tokens are known.

    `spans`, `rows` and `answer` are as in :class:`Finished`. `busy` is the engine's message if it
    has no room for the request now, and `retry_after_s` its Retry-After in seconds.
    """

    request_id: int
    attempt: int
    spans: tuple[VersionSpan, ...] | None = None
    rows: Mapping[str, Rows] | None = None
    answer: Answer | None = None
    busy: str = ""
    retry_after_s: float | None = None


class Failed(Event, frozen=True):
    """An attempt failed.

    Attributes:
        final: the engine refused the request itself, so a retry there cannot help.
        unsent: no part of the attempt has reached the engine.
        answered: the engine answered with an error of its own (HTTP 500 and above), which the
            request may have caused.
    """

    request_id: int
    attempt: int
    cause: str
    final: bool = False
    unsent: bool = False
    answered: bool = False


# --- episodes and rewards --------------------------------------------------------------------


class TurnRequested(Event, frozen=True, eq=False):
    """An episode requests a turn.

    Attributes:
        input_ids: the whole context, int32 [n].
        media: all media of the context; None for those of the prompt.
        branch: the turn may continue any branch of the rollout, or start a new one. Otherwise it
            continues the previous turn.
    """

    rollout_id: int
    input_ids: Int32Array
    sampling: SamplingParams | None = None
    media: tuple[Media, ...] | None = None
    branch: bool = False


class TurnWithdrawn(Event, frozen=True):
    """An episode withdrew its turn. Once the request has ended, the answer is ResolveTurn with the
    tokens generated so far. The episode requests nothing else before the answer."""

    rollout_id: int


class TurnKept(Event, frozen=True):
    """The episode keeps the tokens of the turn that it withdrew."""

    rollout_id: int


class EpisodeFinished(Event, frozen=True):
    """An episode returned.

    Attributes:
        score: its score; None if it returned none.
        branches: which of several branches are kept.
        keeps_known: turns known from before a restart are kept even if the episode has not
            requested them again.
    """

    rollout_id: int
    score: Score | None = None
    branches: BranchRule = "last"
    keeps_known: bool = False


class EpisodeFailed(Event, frozen=True):
    """An episode raised. `lost`: it raised MemberLost."""

    rollout_id: int
    cause: str
    lost: bool = False


class Rewarded(Event, frozen=True):
    """The score of one rollout, which has a reward."""

    rollout_id: int
    score: Score


class GroupRewarded(Event, frozen=True):
    """The scores of a whole group, in the order of its members; each has a reward."""

    group_id: int
    scores: tuple[Score, ...]


class RewardFailed(Event, frozen=True):
    """The reward or the accept function raised for this group. `rollout_id` is the rollout that was
    scored alone, if any. `lost`: the reward function raised MemberLost for it."""

    group_id: int
    cause: str
    rollout_id: int | None = None
    lost: bool = False


class EpisodeWaits(Event, frozen=True):
    """An episode starts to wait for `what`, until it requests a turn."""

    rollout_id: int
    what: EpisodeWait


class TeardownFailed(Event, frozen=True):
    """A teardown function of an episode raised or timed out."""

    rollout_id: int
    cause: str


class Filtered(Event, frozen=True):
    """The answer to Filter: whether the user's accept function accepts the group."""

    group_id: int
    accepted: bool


# --- engine control --------------------------------------------------------------------------


class Paused(Event, frozen=True):
    """The engine has paused."""

    engine: str


class Flushed(Event, frozen=True):
    """The engine has flushed its KV cache."""

    engine: str


class Refitted(Event, frozen=True):
    """An engine's answer to Refit, whether the refit succeeded or not.

    Attributes:
        version: the version that the engine itself reports after the refit; None if its weights
            are inconsistent, neither old nor new.
        cause: what failed; empty on success.
        catch_up, followed: as in the command.
    """

    engine: str
    version: int | None
    cause: str = ""
    catch_up: bool = False
    followed: bool = False


class Verified(Event, frozen=True):
    """The answer to Verify: the version that the engine reports; None if its weights are
    inconsistent."""

    engine: str
    version: int | None


class LoadSeen(Event, frozen=True):
    """An engine's report about its KV pool, once a second if requests move from full pools or
    sessions share them. No listener sees this event.

    Attributes:
        used: number of tokens in the pool, including other clients' tokens.
        queued: number of requests that wait for room.
        preemptions: number of requests preempted since the engine was started; None if unknown.
    """

    engine: str
    used: int
    queued: int
    preemptions: int | None = None


class VersionSeen(Event, frozen=True):
    """A watched engine's report, once a second, if another process loads the weights. No listener
    sees this event.

    Attributes:
        version: None if its weights are inconsistent.
        paused: whether it is paused, by any client; None if not queried, or if it cannot report it.
    """

    engine: str
    version: int | None
    paused: bool | None = None


class Released(Event, frozen=True):
    """The engine has released the memory of `tags`."""

    engine: str
    tags: tuple[str, ...]


class Woken(Event, frozen=True):
    """The engine has the memory of `tags` again."""

    engine: str
    tags: tuple[str, ...]


class Continued(Event, frozen=True):
    """The engine's pause has ended."""

    engine: str


class ControlFailed(Event, frozen=True):
    """A control call failed or timed out, so the engine's state is unknown."""

    engine: str
    call: ControlCall
    cause: str


class EngineJoined(Event, frozen=True):
    """An engine is connected: a new one, or one that was lost and is back."""

    info: EngineInfo


class EngineLost(Event, frozen=True):
    """An engine is gone: it is unreachable, has crashed, or was removed from the fleet."""

    engine: str
    cause: str


class Tick(Event, frozen=True):
    """A second has passed. No listener sees this event."""
