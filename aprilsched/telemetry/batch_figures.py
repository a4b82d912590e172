"""Figures of batches: one at a time, and over many. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.telemetry.figures import (
    BatchFigures,
    BiasFigures,
    StalenessFigures,
    SteadyState,
)
from aprilsched.types import NO_VERSION, Batch

__all__ = [
    "Bound",
    "Measured",
    "bias",
    "delivered_tokens_per_s",
    "efficiency",
    "measure",
    "off_policy_token_share",
    "staleness",
    "steady_state",
]

Bound = Callable[[Sequence[int], Sequence[int]], float]
"""Prompt lengths and response lengths to T_bound of the whole fleet, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """A batch's figures, and the exact counts behind its shares and means.

    Arrays are int64 [n], one entry for each rollout.
    """

    figures: BatchFigures
    length: int
    """Sum of the response lengths, tokens of the environment included."""
    off_policy: int
    staleness_sum: int
    staleness_max_trained: int
    masked: int
    lengths: NDArray[np.int64]
    sampled_by_rollout: NDArray[np.int64]
    """Tokens that a policy sampled."""
    off_policy_by_rollout: NDArray[np.int64]
    staleness_by_rollout: NDArray[np.int64]
    """Sum over those tokens."""


def measure(
    batch: Batch, *, seconds: float, trainer_seconds: float, bound: Bound | None
) -> Measured:
    """The figures of a batch that took `seconds`."""
    rollouts = list(batch.rollouts)
    versions = np.concatenate([rollout.versions for rollout in rollouts])
    in_loss = np.concatenate([rollout.loss_mask for rollout in rollouts])
    sampled = versions != NO_VERSION
    age = np.where(sampled, batch.version - versions.astype(np.int64), 0)
    ages = age[sampled]
    trained = ages[in_loss[sampled]]
    lengths = [len(rollout) for rollout in rollouts]
    ends = np.cumsum(lengths)
    t_bound = None if bound is None else bound([len(r.prompt_ids) for r in rollouts], lengths)
    off_policy = int((ages > 0).sum())
    return Measured(
        figures=BatchFigures(
            index=batch.index,
            version=batch.version,
            seconds=seconds,
            trainer_seconds=trainer_seconds,
            groups=len(batch.groups),
            rollouts=len(rollouts),
            tokens=int(ages.size),
            mean_length=sum(lengths) / len(lengths),
            off_policy_token_share=_ratio(off_policy, ages.size) or 0.0,
            staleness_mean=_ratio(int(ages.sum()), ages.size) or 0.0,
            staleness_max=int(ages.max(initial=0)),
            t_bound=t_bound,
            efficiency=None if t_bound is None else _ratio(t_bound, seconds),
        ),
        length=sum(lengths),
        off_policy=off_policy,
        staleness_sum=int(ages.sum()),
        staleness_max_trained=int(trained.max(initial=0)),
        masked=int((sampled & ~in_loss).sum()),
        lengths=np.array(lengths, dtype=np.int64),
        sampled_by_rollout=_sums(sampled, ends),
        off_policy_by_rollout=_sums(age > 0, ends),
        staleness_by_rollout=_sums(age, ends),
    )


def delivered_tokens_per_s(batches: Sequence[Measured]) -> float | None:
    """Tokens over seconds, the trainer's included."""
    figures = [batch.figures for batch in batches]
    seconds = sum(f.seconds + f.trainer_seconds for f in figures)
    return _ratio(sum(f.tokens for f in figures), seconds)


def efficiency(batches: Sequence[Measured]) -> float | None:
    """Sum of the bounds over sum of the seconds."""
    bounds = [batch.figures.t_bound for batch in batches]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds):
        return None
    return _ratio(sum(known), sum(batch.figures.seconds for batch in batches))


def off_policy_token_share(batches: Sequence[Measured]) -> float | None:
    """Share of the tokens whose version is older than the one that consumes them."""
    return _ratio(sum(b.off_policy for b in batches), sum(b.figures.tokens for b in batches))


def staleness(batches: Sequence[Measured]) -> StalenessFigures:
    """Mean over tokens, and the largest."""
    tokens = sum(batch.figures.tokens for batch in batches)
    return StalenessFigures(
        mean=_ratio(sum(batch.staleness_sum for batch in batches), tokens) or 0.0,
        max=max((batch.figures.staleness_max for batch in batches), default=0),
        max_trained=max((batch.staleness_max_trained for batch in batches), default=0),
    )


def steady_state(batches: Sequence[Measured], burn_in: int) -> SteadyState:
    """The figures of the batches after the first `burn_in`."""
    kept = batches[burn_in:]
    seconds = sum(batch.figures.seconds for batch in kept)
    return SteadyState(
        burn_in=burn_in,
        batches=len(kept),
        mean_batch_seconds=_ratio(seconds, len(kept)),
        mean_length=_mean_length(kept),
        delivered_tokens_per_s=delivered_tokens_per_s(kept),
        efficiency=efficiency(kept) if kept else None,
        off_policy_token_share=off_policy_token_share(kept),
    )


def bias(batches: Sequence[Measured], burn_in: int, workload_mean: float | None) -> BiasFigures:
    """The length bias of what was delivered.

    By conservation (every unfinished sample is carried over and finishes) the whole run's bias is
    -I * (l / mu - 1) / (K * N) for I samples in flight of mean final length l, and goes to zero.
    What l is only shows when they finish, so the left side of the identity is given: the mean
    delivered length over mu, minus 1.
    """
    long_run = _mean_length(batches[burn_in:])
    overall = _mean_length(batches)
    reference = long_run if workload_mean is None else workload_mean
    known = overall is not None and reference is not None
    kind = "run_after_burn_in" if workload_mean is None else "workload_mean"
    return BiasFigures(
        first_batch_length_bias=_excess(_mean_length(batches[:1]), long_run),
        bias_estimate=_excess(overall, reference),
        bias_reference=kind if known else None,
        workload_mean_length=workload_mean,
        long_run_mean_length=long_run,
        delivered_mean_length=overall,
        delivered_mean_length_by_batch=[batch.figures.mean_length for batch in batches],
    )


def _sums(values: NDArray[np.generic], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of consecutive parts of `values` that end at `ends`; a part may be empty."""
    running = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    return np.diff(running[ends], prepend=0)


def _mean_length(batches: Sequence[Measured]) -> float | None:
    return _ratio(sum(b.length for b in batches), sum(b.figures.rollouts for b in batches))


def _excess(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference - 1


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
