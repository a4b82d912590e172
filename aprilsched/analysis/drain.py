"""Computes what it costs to avoid the transient bias: to wait for its end, or to begin in another
way.

Everything follows from the conservation identity and from the responses in flight. Times are those
of a full engine, which generates one token of each response in `step_seconds`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.laws import KaplanMeier
from aprilsched.telemetry.bias_collector import batches_until, bias_without

__all__ = ["DrainPlan", "expected_longest_rest", "plan_drain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainPlan:
    """The costs of three ways to avoid the bias. Seconds are the work that the fleet does not do,
    as time of the whole fleet."""

    bias_now: float
    further_batches: int
    """Number of batches until the transient is below the requested bias, if as many responses stay
    in flight as now."""
    staggered_launch_seconds: float
    """Cost of a start without the bias: the first launches are spread evenly over the first mean
    response, as if the run had been going on before. The fleet is half empty for that time."""
    drained_epoch_seconds: float
    """Cost of ending the bias at once: nothing is launched until all responses in flight have
    ended. The fleet idles for the longest remaining time minus the mean one."""


def plan_drain(
    law: KaplanMeier,
    tokens: NDArray[np.int64],
    *,
    bias: float,
    delivered: int,
    per_batch: float,
    step_seconds: float,
) -> DrainPlan:
    """Compute the costs for the responses that are in flight now.

    Args:
        law: the law of the lengths.
        tokens: number of tokens so far of each unfinished response, int64 [I].
        bias: the largest accepted bias, as a share of the mean; 0.01 is 1 %.
        delivered: number of responses delivered so far.
        per_batch: number of responses in a batch.
        step_seconds: time in which an engine generates one token of each of its responses.

    Raises:
        ValueError: if `bias` or `per_batch` is not above 0.
    """
    mean = law.mean()
    rest = law.residual_mean(tokens)
    final = float((tokens + rest).mean()) if tokens.size else mean
    needed = batches_until(
        bias, in_flight=tokens.size, excess=final / mean - 1, per_batch=per_batch
    )
    idle = expected_longest_rest(law, tokens) - float(rest.mean()) if tokens.size else 0.0
    return DrainPlan(
        bias_now=bias_without(tokens.size, final, delivered, mean),
        further_batches=max(0, needed - int(delivered // per_batch)),
        staggered_launch_seconds=mean * step_seconds / 2,
        drained_epoch_seconds=idle * step_seconds,
    )


def expected_longest_rest(law: KaplanMeier, tokens: NDArray[np.int64]) -> float:
    """E[max over the unfinished of L - tokens], in tokens, as if they were independent.

    This is the integral over t of 1 - prod(1 - S(tokens + t) / S(tokens)); 0 without unfinished
    ones.
    """
    if not tokens.size:
        return 0.0
    span = max(1, law.end - int(tokens.min()))
    grid = np.union1d(np.linspace(0, span, min(span, 512) + 1).astype(np.int64), [0, 1])
    alive = np.maximum(law.survival_at(tokens), np.finfo(np.float64).tiny)
    over = law.survival_at(tokens[:, None] + grid[None, :-1]) / alive[:, None]
    # A response that is longer than the end of the law is taken to need one more token.
    over[law.survival_at(tokens) == 0, 0] = 1.0
    return float(((1 - np.prod(1 - over, axis=0)) * np.diff(grid)).sum())
