"""What to do. The shell carries these out and reports back with events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from aprilsched.core.lengths.groups import GroupLengths
from aprilsched.core.policies.schedule import Schedule
from aprilsched.types import Batch, Float32Array, Group, Int32Array, Prompt, Rollout, SamplingParams

__all__ = [
    "Abort",
    "AdmitEngine",
    "AwaitFleet",
    "CancelWork",
    "Command",
    "Continue",
    "Deliver",
    "DeliverEvaluation",
    "DiscardTokens",
    "EndOfPrompts",
    "FetchPrompts",
    "FinishSleep",
    "FinishUpdate",
    "Flush",
    "GiveUp",
    "GiveUpFleet",
    "Judge",
    "Launch",
    "LoseEngine",
    "Offer",
    "Pause",
    "Plan",
    "Redeliver",
    "Refit",
    "Release",
    "ReportSlow",
    "ResolveTurn",
    "Retire",
    "Score",
    "ScoreGroup",
    "Send",
    "StartEpisode",
    "Verify",
    "Wake",
    "WantUpdate",
    "WithdrawOffer",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchPrompts:
    """Take `count` prompts from the source; answered by PromptsArrived."""

    count: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Launch:
    """The group is in flight from now on. Nothing is to be done: it is for who keeps books.

    `rollout_ids` are those of its members in their order. `restored`: it is in flight again, after
    the run was resumed, with these lengths.
    """

    group_id: int
    rollout_ids: tuple[int, ...]
    prompt: Prompt
    evaluation_id: int | None = None
    restored: GroupLengths | None = None


# --- requests --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Send:
    """Send an attempt of a request: `input_ids` int32 [n] is prompt and all known tokens.

    `adapter` is the version of the LoRA adapter to sample with, None for the model itself.
    `cache_version`: cached KV is shared only with requests of the same one; None shares with all.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort:
    """End an attempt early; it comes back as Interrupted (or Finished, if that was first)."""

    engine: str
    request_id: int
    attempt: int


# --- engine control --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Pause:
    engine: str
    mode: Literal["retract", "in_place"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flush:
    engine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verify:
    """Ask the engine which version it has; answered by Verified.

    It has been without requests for a while, or a connection to it broke: it may have been
    restarted since, with other weights, and nothing is sent to it before the answer.
    """

    engine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refit:
    """Bring `version` into these engines; answered by Refitted for each.

    All of them are paused, unless it goes `beside` what they sample with. `catch_up`: it is the
    fleet's version already, published again for an engine on standby.
    """

    version: int
    engines: tuple[str, ...]
    beside: bool = False
    catch_up: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Retire:
    """Nothing samples with this version's adapter on the engine any more: unload it there."""

    engine: str
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Give the memory of `tags` to the trainer; the engine is paused."""

    engine: str
    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wake:
    """Take the memory of `tags` back."""

    engine: str
    tags: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Continue:
    engine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoseEngine:
    """The engine is out of use: end its streams, and say why.

    `standby`: it answers, and comes back with the next refit that reaches it; otherwise it is
    quarantined. `last`: no engine is left, neither in use nor on standby.
    """

    engine: str
    cause: str
    last: bool
    standby: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmitEngine:
    """The engine takes part from now on: it has the fleet's version."""

    engine: str
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportSlow:
    """The engine is slow, and there is no other to compare it with: it stays in use."""

    engine: str
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitFleet:
    """No engine is left. Those that were lost last, with causes, are waited for."""

    lost: tuple[tuple[str, str], ...]
    waited_s: float
    left_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUpFleet:
    """No engine came back in time: whoever waits, now or later, is told."""

    lost: tuple[tuple[str, str], ...]
    waited_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WantUpdate:
    """These engines are there without the fleet's weights, those of `version`, and no other is:
    whoever waits for the batch or for `evaluations`, which are abandoned, is told to publish."""

    engines: tuple[str, ...]
    version: int
    batch: bool
    evaluations: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishUpdate:
    """The update is over. `failed` maps engines that are quarantined now to their cause.

    `cause` is empty on success; otherwise no engine took the version, and what has the old one
    goes on under it.
    """

    version: int
    failed: tuple[tuple[str, str], ...] = ()
    cause: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishSleep:
    """Every engine's memory is the trainer's now (`asleep`), or its own again."""

    asleep: bool


# --- episodes and rewards --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StartEpisode:
    rollout_id: int
    index: int
    prompt: Prompt
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResolveTurn:
    """The answer to an episode's turn: int32 [n], float32 [n], int32 [n].

    `withdrawn`: the episode gave the turn up, and this is what had come of it.
    """

    rollout_id: int
    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish_reason: Literal["stop", "length"]
    withdrawn: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DiscardTokens:
    """The last tokens of the rollout are forgotten: `sampled` ones and `environment` ones. Nothing
    is to be done. Listeners count them; the ledger has the sampled ones under `reason`."""

    rollout_id: int
    sampled: int
    environment: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Score:
    rollout: Rollout
    prompt: Prompt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoreGroup:
    group: Group


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judge:
    """Ask the user's accept function about a scored group."""

    group: Group


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelWork:
    """The group went to the ledger: cancel the episodes and rewards of its rollouts.

    `culprit` is the one whose failure took the others along, if one did.
    """

    group_id: int
    rollout_ids: tuple[int, ...]
    reason: str
    cause: str
    culprit: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """So many groups failed in a row that going on would only burn prompts."""

    groups: int
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Choose a schedule on this evidence; answered by Planned.

    Attributes:
        batch_groups: groups that a batch takes, as far as is known.
        ended: groups that have ended, those launched last.
        open: groups under way, as they are now.
        prompt_tokens: mean length of the prompts.
        engines: how many are in use.
        kv_tokens: their KV pools together; None where one of them does not say.
        current: the schedule in force.
    """

    batch_groups: int
    ended: tuple[GroupLengths, ...]
    open: tuple[GroupLengths, ...]
    prompt_tokens: float
    engines: int
    kv_tokens: int | None
    current: Schedule


# --- the trainer -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Offer:
    """Keep the batch safe, then let the trainer take it; answered by BatchTaken. No other one is
    offered until then, or until this one is withdrawn."""

    offered: Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class WithdrawOffer:
    """The trainer must not take the batch any more: a new version comes."""

    index: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Deliver:
    """The trainer has taken the batch. Nothing is to be done: it is for who keeps books."""

    batch: Batch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Redeliver:
    """The trainer has taken a batch that was there before the run was resumed."""

    batch: Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfPrompts:
    """The prompts have ended and everything was delivered: the trainer's wait is over."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeliverEvaluation:
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
    | DiscardTokens
    | Score
    | ScoreGroup
    | Judge
    | CancelWork
    | GiveUp
    | Plan
    | Offer
    | WithdrawOffer
    | Deliver
    | Redeliver
    | EndOfPrompts
    | DeliverEvaluation
)
