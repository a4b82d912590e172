"""Events: what has happened. The shell makes one of every answer, error and call of the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from msgspec import Struct

from aprilsched.kernel.core.policies.schedule import Schedule
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
    """Something that has happened.

    Events, commands and facts are msgspec structs, which are made in a quarter of a frozen
    dataclass's time.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What the core knows of an engine when it joins, running and, where a refit flushes its
    cache, flushed.

    Attributes:
        version: the version of its weights; None if they are inconsistent.
        holds_stragglers: it can release memory while requests wait in a pause.
        keeps_weights: weights that it released come back as they were.
        kv_tokens: the size of its KV pool, in tokens; None if it does not report it.
        reserves: a request waits until there is room for all that it may still generate.
        max_running: the number of requests that it runs at the same time; None if it does not
            report it.
        stores_kv: cached KV may survive its flush.
    """

    name: str
    version: int | None
    holds_stragglers: bool = False
    keeps_weights: bool = False
    kv_tokens: int | None = None
    reserves: bool = False
    max_running: int | None = None
    stores_kv: bool = False


# --- the trainer -----------------------------------------------------------------------------


class Opened(Event, frozen=True):
    """The fleet is up, and all engines have the same policy version. In a resumed run some or all
    engines may have another version than the run.

    `adopt`: if all engines have one version that is newer than the resumed run's, the run takes it
    over.
    """

    engines: tuple[EngineInfo, ...]
    adopt: bool = True


class BatchRequested(Event, frozen=True):
    """The trainer wants its next batch, or goes on with one that it takes group by group."""

    streamed: bool = False
    """The trainer takes the groups of the batch one by one, as soon as they are accepted."""


class BatchWithdrawn(Event, frozen=True):
    """The trainer no longer waits for a batch, because its call was cancelled. The batch stays in
    work, or offered, for the next call."""


class BatchTaken(Event, frozen=True):
    """The trainer has taken the batch that was offered. It is delivered from now on. A part of a
    streamed batch that is not the last one is only noted."""

    index: int


class BatchesAcknowledged(Event, frozen=True):
    """The trainer is done with these batches: they need not be delivered again after a restart."""

    batches: tuple[int, ...]


class TrainerReturned(Event, frozen=True):
    """A trainer that had lost its connection to the scheduler has it again, or another trainer has
    taken its place. Of the batches that are not acknowledged it has these, and the others are
    delivered to it again. Without a store there are none of which the scheduler knows.

    Of a batch that it takes group by group it has the groups `groups`, and gets the others."""

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
    """The trainer's log-probabilities of a batch, computed with the weights of `version`, against
    those of the engines. `by_engine` and `by_position` are of the tokens of staleness 0, `by_age`
    of all. Entry i of `by_position` is of the positions 2**i to 2**(i + 1) - 1 in the response,
    counted from 1. The last entry of `by_age` is of all older tokens. Tokens are `skipped` where
    their version is not certain or they attend to keys of older weights, and `not_finite` where a
    log-probability is NaN or infinite. `bound` is a magnitude in nats, see
    :class:`LogprobDifferences`."""

    batch: int
    version: int
    bound: float
    by_engine: dict[str, LogprobDifferences]
    by_position: tuple[LogprobDifferences, ...]
    by_age: tuple[LogprobDifferences, ...]
    skipped: int = 0
    not_finite: int = 0


class LogprobsReported(Event, frozen=True):
    """The trainer has computed the log-probabilities of a batch, and they were compared."""

    comparison: LogprobComparison


class EvaluationRequested(Event, frozen=True):
    """The trainer wants the responses to these prompts. They are generated to their end, and are
    neither over-provisioned nor carried."""

    evaluation_id: int
    prompts: tuple[Prompt, ...]
    group_size: int


class EvaluationWithdrawn(Event, frozen=True):
    """Nobody waits for the evaluation any more, because the call was cancelled."""

    evaluation_id: int


class UpdateRequested(Event, frozen=True):
    """The trainer has a new policy version for the engines.

    Attributes:
        adapter: the version is an adapter, which is loaded while the engines run.
        external: somebody else has brought the version into the engines already. They are only
            asked for it, and are not paused.
        labelled: with `external`, the engines named the version from its first token on. Otherwise
            nobody can tell which version sampled the tokens in flight.
        republishable: as long as it is the fleet's version, it can be published again to an engine
            that comes back.
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
    """The trainer wants the engines' memory of these `tags`."""

    tags: tuple[str, ...]


class WakeRequested(Event, frozen=True):
    """The trainer gives the engines' memory back."""


class HoldChanged(Event, frozen=True):
    """The trainer wants the engines to be paused (`held`), with requests waiting inside them, or to
    generate again. Updates are carried out meanwhile. Saying it twice changes nothing."""

    held: bool


class GroupWithdrawn(Event, frozen=True):
    """Nobody wants the group any more. It is ignored if the group has left flight, or is offered in
    a batch already."""

    group_id: int
    cause: str


class Planned(Event, frozen=True):
    """The answer to Plan. With None the schedule in force stays; `cause` says what went wrong, if
    something did."""

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
        prompt_tokens: what the context that was sent became with its media expanded, in tokens;
            None without media.
    """

    request_id: int
    attempt: int
    token_ids: Int32Array
    logprobs: Float32Array
    label: int | None = None
    rows: Mapping[str, Rows] | None = None
    prompt_tokens: int | None = None


class Finished(Event, frozen=True, gc=False):
    """An attempt ran to its end. `spans` has the versions of the attempt's own output, as reported
    by the engine, `rows` the new rows of each companion of the context, and `answer` what else of
    the engine's answer is kept."""

    request_id: int
    attempt: int
    reason: FinishReason
    spans: tuple[VersionSpan, ...] | None = None
    rows: Mapping[str, Rows] | None = None
    answer: Answer | None = None


class Interrupted(Event, frozen=True, gc=False):
    """An attempt came back before its end: it was aborted, or never sent. Its tokens are known.
    `spans`, `rows` and `answer` are as in :class:`Finished`. `busy` is what the engine said if it
    has no room for the request now, and `retry_after_s` how many seconds it asks to wait."""

    request_id: int
    attempt: int
    spans: tuple[VersionSpan, ...] | None = None
    rows: Mapping[str, Rows] | None = None
    answer: Answer | None = None
    busy: str = ""
    retry_after_s: float | None = None


class Failed(Event, frozen=True):
    """An attempt failed. `final`: the engine refused the request itself, so that repeating it there
    cannot help. `unsent`: nothing of the attempt has reached the engine. `answered`: the engine
    said that it failed (HTTP 500 and above), which the request may have caused."""

    request_id: int
    attempt: int
    cause: str
    final: bool = False
    unsent: bool = False
    answered: bool = False


# --- episodes and rewards --------------------------------------------------------------------


class TurnRequested(Event, frozen=True, eq=False):
    """An episode asks for a turn. `input_ids`, int32 [n], is the whole context, and `media` all
    that it shows; None for those of the prompt. It continues the turn before, unless `branch` says
    that it may continue any branch of the rollout, or begin one."""

    rollout_id: int
    input_ids: Int32Array
    sampling: SamplingParams | None = None
    media: tuple[Media, ...] | None = None
    branch: bool = False


class TurnWithdrawn(Event, frozen=True):
    """An episode withdrew its turn. The answer is ResolveTurn with the tokens generated until then,
    once the request is back. Until then the episode asks for nothing else."""

    rollout_id: int


class TurnKept(Event, frozen=True):
    """The episode keeps the tokens of the turn that it withdrew."""

    rollout_id: int


class EpisodeFinished(Event, frozen=True):
    """An episode returned, with its score if it gave one. `branches` says which of several are
    kept, and `keeps_known` whether turns that are known from before a restart are kept if it has
    not asked for them again."""

    rollout_id: int
    score: Score | None = None
    branches: BranchRule = "last"
    keeps_known: bool = False


class EpisodeFailed(Event, frozen=True):
    """An episode raised. `lost`: it said that the rollout is lost (MemberLost)."""

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
    """The reward or the accept function raised for this group. `lost` is the rollout that the
    reward function said is lost (MemberLost), if it did."""

    group_id: int
    cause: str
    lost: int | None = None


class EpisodeWaits(Event, frozen=True):
    """What an episode waits for from now on, until it asks for a turn."""

    rollout_id: int
    what: EpisodeWait


class TeardownFailed(Event, frozen=True):
    """What an episode had registered for its end raised, or did not end in time."""

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
    """What an engine reports of its KV pool once a second, where requests move from full pools. No
    listener sees this event.

    Attributes:
        used: number of tokens in the pool, those of other clients included.
        queued: number of requests that wait for room.
    """

    engine: str
    used: int
    queued: int


class VersionSeen(Event, frozen=True):
    """What a watched engine reports once a second, where somebody else moves the weights. No
    listener sees this event.

    Attributes:
        version: None if its weights are inconsistent.
        paused: whether it is paused, by whomever; None if it was not asked, or cannot tell.
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
    """An engine is gone: it is unreachable, crashed, or was taken out of the fleet."""

    engine: str
    cause: str


class Tick(Event, frozen=True):
    """A second has passed. No listener sees this event."""
