"""Measures the bias of a run: conservation, laws, staleness by length and censors, from arrays
alone.

Lengths are in tokens. A bias is a share of the mean length: 0 for none, and -0.1 for 10 % short.
:mod:`aprilsched.analysis.bias` has what it costs to avoid the bias of the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aprilsched.core.lengths.laws import KaplanMeier, kaplan_meier
from aprilsched.telemetry.bias_collector import (
    batches_until,
    bias_without,
    law_figures,
    sample_law,
)
from aprilsched.telemetry.figures import LawFigures


@dataclass(frozen=True, kw_only=True, slots=True)
class Conservation:
    """Ids of the rollouts that are not in exactly one place; all sets are empty if nothing is
    wrong."""

    lost: frozenset[int]
    """Rollouts that were launched and are in no place."""
    twice: frozenset[int]
    """Rollouts that are in two places, or were delivered twice."""
    unknown: frozenset[int]
    """Rollouts that are in a place and were never launched."""

    @property
    def holds(self) -> bool:
        return not (self.lost or self.twice or self.unknown)


def conservation(
    launched: Iterable[int],
    *,
    delivered: Iterable[int],
    in_flight: Iterable[int] = (),
    dropped: Iterable[int] = (),
) -> Conservation:
    """Find the ids that are not in exactly one place: delivered once, in flight, or dropped. There
    is no tolerance."""
    ids, counts = np.unique([*delivered, *in_flight, *dropped], return_counts=True)
    somewhere = frozenset(int(i) for i in ids)
    known = frozenset(launched)
    return Conservation(
        lost=known - somewhere,
        twice=frozenset(int(i) for i in ids[counts > 1]),
        unknown=somewhere - known,
    )


def drawn_law(lengths: ArrayLike, partials: ArrayLike = ()) -> KaplanMeier:
    """Estimate the law from the `lengths` int64 [n] of finished responses and the tokens so far of
    the unfinished ones, int64 [m].

    Raises:
        ValueError: if both arrays are empty.
    """
    finished = np.asarray(lengths, dtype=np.int64)
    open_ = np.asarray(partials, dtype=np.int64)
    censored = np.repeat([False, True], [finished.size, open_.size])
    return kaplan_meier(np.concatenate((finished, open_)), censored)


@dataclass(frozen=True, kw_only=True, slots=True)
class LawComparison:
    """Figures of the delivered lengths, compared with those of the drawn lengths."""

    delivered: LawFigures
    drawn: LawFigures
    mean: float
    """Delivered / drawn - 1, as for the three other figures."""
    p50: float
    p90: float
    p99: float


def compare_laws(delivered: NDArray[np.int64], drawn: KaplanMeier) -> LawComparison:
    """Compare delivered lengths, int64 [n], with the law that they are drawn from.

    Raises:
        ValueError: if nothing was delivered.
    """
    ours, theirs = sample_law(delivered), law_figures(drawn)
    if ours is None:
        raise ValueError("nothing was delivered; compare a run of at least one batch.")
    return LawComparison(
        delivered=ours,
        drawn=theirs,
        mean=ours.mean / theirs.mean - 1,
        p50=ours.p50 / theirs.p50 - 1,
        p90=ours.p90 / theirs.p90 - 1,
        p99=ours.p99 / theirs.p99 - 1,
    )


# --- drain ---------------------------------------------------------------------------------------

# Computes what it costs to avoid the transient bias: to wait for its end, or to begin in another
# way.
#
# Everything follows from the conservation identity and from the responses in flight. Times are
# those of a full engine, which generates one token of each response in `step_seconds`.


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
