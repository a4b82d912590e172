"""What happened. The shell turns every answer, error and call of the trainer into one of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from aprilsched.core.policies.schedule import Schedule
from aprilsched.types import (
    FinishReason,
    Float32Array,
    Int32Array,
    Prompt,
    RefusedPrompt,
    SamplingParams,
    VersionSpan,
)

__all__ = [
    "BatchRequested",
    "BatchTaken",
    "BatchWithdrawn",
    "BatchesAcknowledged",
    "Continued",
    "ControlCall",
    "ControlFailed",
    "EngineInfo",
    "EngineJoined",
    "EngineLost",
    "EpisodeFailed",
    "EpisodeFinished",
    "EvaluationRequested",
    "EvaluationWithdrawn",
    "Event",
    "Failed",
    "Finished",
    "Flushed",
    "GroupRewarded",
    "Interrupted",
    "Judged",
    "Opened",
    "Paused",
    "Planned",
    "Progress",
    "PromptsArrived",
    "Refitted",
    "Released",
    "RewardFailed",
    "Rewarded",
    "SleepRequested",
    "Tick",
    "TurnKept",
    "TurnRequested",
    "TurnWithdrawn",
    "UpdateRequested",
    "UpdateWithdrawn",
    "Verified",
    "WakeRequested",
    "Woken",
]

ControlCall: TypeAlias = Literal["pause", "flush", "refit", "release", "wake", "continue", "verify"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What the core knows of an engine when it joins.

    Attributes:
        version: of the weights it has; None if they are torn.
        holds_stragglers: it can release memory while requests wait in a pause.
        keeps_weights: weights that it released come back as they were.
        kv_tokens: the size of its KV pool, in tokens; None if it does not say.
        max_running: requests that it runs at the same time; None if it does not say.
    """

    name: str
    version: int | None
    holds_stragglers: bool = False
    keeps_weights: bool = False
    kv_tokens: int | None = None
    max_running: int | None = None


# --- the trainer -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """The fleet is up, all engines with the same policy version; in a resumed run some of them, or
    all, may have another one than the run.

    `adopt`: if all have a newer one than the resumed run, it is the run's.
    """

    engines: tuple[EngineInfo, ...]
    adopt: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequested:
    """The trainer wants its next batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchWithdrawn:
    """The trainer no longer waits for it (its call was cancelled). What is offered stays so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTaken:
    """The trainer has the batch that was offered. From now on it is delivered, and not before."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchesAcknowledged:
    """The trainer is done with these batches, and will not ask for them again."""

    batches: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequested:
    """Run these prompts to their end, neither over-provisioned nor carried."""

    evaluation_id: int
    prompts: tuple[Prompt, ...]
    group_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationWithdrawn:
    """The call that asked for it was cancelled: nobody waits for its answers."""

    evaluation_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRequested:
    """The trainer has a new policy version; bring it into the engines.

    `beside`: it is an adapter, loaded beside the one in use. `republishable`: while it is the
    fleet's version it can be published again, to an engine that comes back. `acknowledges` are the
    batches that the trainer has: with the update they need not be delivered again.
    """

    version: int
    beside: bool = False
    republishable: bool = False
    acknowledges: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateWithdrawn:
    """The trainer's call was cancelled."""

    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SleepRequested:
    """The trainer wants the engines' memory of these `tags`."""

    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WakeRequested:
    """The trainer gives the memory back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Answer to Plan. None keeps the schedule in force; `cause` says what went wrong, if so."""

    schedule: Schedule | None
    cause: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsArrived:
    """Answer to FetchPrompts. `last`: the source has ended. `partial`: the rest follows later."""

    prompts: tuple[Prompt | RefusedPrompt, ...]
    last: bool = False
    partial: bool = False


# --- requests --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Progress:
    """New tokens of an attempt: int32 [n] and float32 [n].

    `label` is the version that the engine said it had when it sent them; None where it did not
    say, or where the spans of the attempt's end say it of each token.
    """

    request_id: int
    attempt: int
    token_ids: Int32Array
    logprobs: Float32Array
    label: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """An attempt ran to its end. `spans` covers the attempt's own output."""

    request_id: int
    attempt: int
    reason: FinishReason
    spans: tuple[VersionSpan, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """An attempt came back before its end, aborted or never sent; its tokens are known."""

    request_id: int
    attempt: int
    spans: tuple[VersionSpan, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """An attempt failed. `final`: repeating it cannot help (the request itself is refused).
    `unsent`: nothing of it has reached the engine."""

    request_id: int
    attempt: int
    cause: str
    final: bool = False
    unsent: bool = False


# --- episodes and rewards --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TurnRequested:
    """An episode asks for tokens. `input_ids` int32 [n] is the whole context."""

    rollout_id: int
    input_ids: Int32Array
    sampling: SamplingParams | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnWithdrawn:
    """An episode cancelled its call for tokens. Answered by ResolveTurn with what came of the turn,
    once its request is back; until then the episode asks for nothing else."""

    rollout_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnKept:
    """The episode has looked at what came of the turn that it withdrew, so the tokens stay."""

    rollout_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeFinished:
    """An episode returned, with its reward if it computed one."""

    rollout_id: int
    reward: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeFailed:
    """An episode raised."""

    rollout_id: int
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewarded:
    """The reward of one rollout."""

    rollout_id: int
    reward: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRewarded:
    """The rewards of a whole group, in the order of its members."""

    group_id: int
    rewards: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFailed:
    """The reward or the accept function raised for this group."""

    group_id: int
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """The answer of the user's accept function."""

    group_id: int
    accepted: bool


# --- engine control --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Paused:
    engine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Flushed:
    engine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refitted:
    """`version` is what the engine itself says it has after the refit, successful or not.

    None: its weights are torn, neither old nor new. `catch_up` as in the command it answers.
    """

    engine: str
    version: int | None
    cause: str = ""
    catch_up: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """Answer to Verify: the version that the engine says it has; None if its weights are
    inconsistent."""

    engine: str
    version: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    engine: str
    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Woken:
    engine: str
    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Continued:
    engine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlFailed:
    """A control call failed or timed out, so the engine's state is unknown."""

    engine: str
    call: ControlCall
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineJoined:
    """An engine is there: a new one, or one that was lost and is back."""

    info: EngineInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLost:
    """An engine is gone (unreachable, crashed, taken out of the fleet)."""

    engine: str
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A second has passed. Fed by the shell, and shown to no listener."""


Event: TypeAlias = (
    Opened
    | BatchRequested
    | BatchWithdrawn
    | BatchTaken
    | BatchesAcknowledged
    | EvaluationRequested
    | EvaluationWithdrawn
    | UpdateRequested
    | UpdateWithdrawn
    | SleepRequested
    | WakeRequested
    | Planned
    | PromptsArrived
    | Progress
    | Finished
    | Interrupted
    | Failed
    | TurnRequested
    | TurnWithdrawn
    | TurnKept
    | EpisodeFinished
    | EpisodeFailed
    | Rewarded
    | GroupRewarded
    | RewardFailed
    | Judged
    | Paused
    | Flushed
    | Refitted
    | Verified
    | Released
    | Woken
    | Continued
    | ControlFailed
    | EngineJoined
    | EngineLost
    | Tick
)
