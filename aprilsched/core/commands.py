"""What to do. The shell carries these out and reports back with events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from aprilsched.types import Batch, Float32Array, Group, Int32Array, Prompt, Rollout, SamplingParams

__all__ = [
    "Abort",
    "CancelWork",
    "Command",
    "Continue",
    "Deliver",
    "DeliverEvaluation",
    "EndOfPrompts",
    "FetchPrompts",
    "FinishUpdate",
    "Flush",
    "GiveUp",
    "Judge",
    "LoseEngine",
    "Pause",
    "Refit",
    "ResolveTurn",
    "Score",
    "ScoreGroup",
    "Send",
    "StartEpisode",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchPrompts:
    """Take `count` prompts from the source; answered by PromptsArrived."""

    count: int


# --- requests --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Send:
    """Send an attempt of a request: `input_ids` int32 [n] is prompt and all known tokens."""

    engine: str
    request_id: int
    attempt: int
    rollout_id: int
    group_id: int
    input_ids: Int32Array
    sampling: SamplingParams


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
class Refit:
    """Bring `version` into these engines, all of them paused; answered by Refitted for each."""

    version: int
    engines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Continue:
    engine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoseEngine:
    """The engine is quarantined: end its streams, do not use it, and say why.

    `last`: no engine is left.
    """

    engine: str
    cause: str
    last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishUpdate:
    """The update is over. `failed` maps engines that are quarantined now to their cause.

    `cause` is empty on success; otherwise no engine took the version and the old one goes on.
    """

    version: int
    failed: tuple[tuple[str, str], ...] = ()
    cause: str = ""


# --- episodes and rewards --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StartEpisode:
    rollout_id: int
    index: int
    prompt: Prompt
    sampling: SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResolveTurn:
    """The answer to an episode's turn: int32 [n], float32 [n], int32 [n]."""

    rollout_id: int
    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish_reason: Literal["stop", "length"]


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
    """The group went to the ledger: cancel the episodes and rewards of its rollouts."""

    group_id: int
    rollout_ids: tuple[int, ...]
    reason: str
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """So many groups failed in a row that going on would only burn prompts."""

    groups: int
    cause: str


# --- the trainer -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Deliver:
    """Hand the batch to the trainer."""

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
    | Send
    | Abort
    | Pause
    | Flush
    | Refit
    | Continue
    | LoseEngine
    | FinishUpdate
    | StartEpisode
    | ResolveTurn
    | Score
    | ScoreGroup
    | Judge
    | CancelWork
    | GiveUp
    | Deliver
    | EndOfPrompts
    | DeliverEvaluation
)
