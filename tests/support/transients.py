"""Compares the bias that goes away, as the conservation identity predicts it, with the measured
one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.distributions import kaplan_meier
from aprilsched.observe.figures.bias_collector import bias_without, expected_lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Transient:
    """The two sides of the identity: predicted, -I * (l / mu - 1) / (K * N), and measured, mean /
    mu - 1."""

    in_flight: int
    in_flight_mean: float
    """l, the mean length of the responses in flight, in tokens; mu if nothing is in flight."""
    predicted: float
    measured: float


def realised_transient(
    lengths: NDArray[np.int64],
    delivered_in: NDArray[np.int64],
    launched_in: NDArray[np.int64],
    *,
    batches: int,
    mean: float | None = None,
) -> Transient:
    """The identity after the first `batches` batches of a run that was drained.

    By default, mu is the mean length of everything that was launched until then. Both sides are
    then equal, which checks the counting. With the mean of the distribution, they differ by the
    chance of the prompts.

    Args:
        lengths: final lengths, int64 [n].
        delivered_in: number of the batch of each response, from 0.
        launched_in: number of the batch that was being generated at its launch, from 0.
        batches: number of delivered batches to use, at least 1.
        mean: mu.
    """
    launched = launched_in < batches
    delivered = delivered_in < batches
    open_ = launched & ~delivered
    mu = float(lengths[launched].mean()) if mean is None else mean
    final = float(lengths[open_].mean()) if open_.any() else mu
    return Transient(
        in_flight=int(open_.sum()),
        in_flight_mean=final,
        predicted=bias_without(int(open_.sum()), final, int(delivered.sum()), mu),
        measured=float(lengths[delivered].mean()) / mu - 1,
    )


def live_transient(
    delivered: NDArray[np.int64],
    tokens: NDArray[np.int64],
    finished: NDArray[np.bool_],
    *,
    mean: float | None = None,
) -> Transient:
    """The identity during a run, where l comes from the expected remaining lengths given the tokens
    so far.

    Args:
        delivered: lengths of the delivered responses, int64 [n].
        tokens, finished: int64 [I] and bool [I] of the responses in flight.
        mean: mu; by default the mean of the estimated distribution. Both sides are then equal,
            because the estimate redistributes the censored responses (Efron's self-consistency).
    """
    ended = np.concatenate((np.ones(delivered.size, dtype=np.bool_), finished))
    distribution = kaplan_meier(np.concatenate((delivered, tokens)), ~ended)
    mu = distribution.mean() if mean is None else mean
    final = expected_lengths(distribution, tokens, finished)
    expected = float(final.mean()) if final.size else mu
    return Transient(
        in_flight=final.size,
        in_flight_mean=expected,
        predicted=bias_without(final.size, expected, delivered.size, mu),
        measured=float(delivered.mean()) / mu - 1,
    )
