"""The fields of ``bias`` in summary.json that are estimates of length laws and what bends them.

Lengths are in tokens, those of the environment included. A bias is a share of the mean length:
0 is none, -0.1 is 10 % too short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = [
    "CensoringFigures",
    "DecileFigures",
    "DropFigures",
    "InFlightFigures",
    "LawFigures",
    "MeanReference",
    "TransientFigures",
]

MeanReference: TypeAlias = Literal["workload_mean", "drawn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LawFigures:
    """A law of lengths. Quantiles: the shortest length that a share of at least q reaches."""

    mean: float
    p50: float
    p90: float
    p99: float
    percentiles: list[int]
    """The quantiles at 0.01, 0.02, …, 0.99 and the longest."""
    responses: int
    """Behind it, unfinished ones included."""
    unresolved: float
    """Share of the responses that are longer than anything that has finished: what the figures
    say of them is a lower bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InFlightFigures:
    """Launched for training and not delivered when the run ended."""

    rollouts: int
    unfinished: int
    """Of them; the others wait for their siblings or their batch."""
    mean_tokens_so_far: float
    expected_mean_length: float
    """Of all of them in the end: tokens so far plus the mean of the rest, given those."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransientFigures:
    """The bias of what was delivered that goes to zero, because what is missing is in flight.

    With I in flight of mean final length l and K * N delivered it is -I * (l / mu - 1) / (K * N).
    """

    predicted: float
    """By that identity, from those in flight at the end."""
    measured: float
    """Mean delivered length / mu - 1. What `predicted` does not explain is the chance of the
    prompts, a censor, or a law that drifts."""
    mean: float
    """mu."""
    reference: MeanReference
    """Where mu is from: known beforehand, or estimated in this run."""
    predicted_by_batch: list[float]
    """After each batch, with the final lengths that were known or expected at the end."""
    measured_by_batch: list[float]
    """Of all delivered until then."""
    further_batches_to_1_percent: int
    """Batches after which it is at most 1 %, with as many in flight as now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecileFigures:
    """Delivered responses by tenths of equal number, the shortest first; 10 entries each."""

    mean_length: list[float]
    staleness_mean: list[float]
    """Over the sampled tokens."""
    off_policy_token_share: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class DropFigures:
    """What was dropped for one reason."""

    rollouts: int
    tokens: int
    """That they had."""
    expected_mean_length: float | None
    """They would have had in the end; None where it cannot be estimated."""
    effect: float | None
    """Bias of everything else that comes of it. It does not go away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CensoringFigures:
    """Did the schedule select responses by their length?"""

    policies: list[str]
    """The reasons, as the ledger names them, by which it did; empty for none."""
    by_reason: dict[str, DropFigures] = field(default_factory=dict[str, DropFigures])
    effect: float | None = None
    """Of those policies together."""
    warning: str | None = None
