"""The bias that goes away: what the conservation identity says beside what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.identity import bias_without, expected_lengths
from aprilsched.core.lengths.kaplan_meier import kaplan_meier

__all__ = ["Transient", "live_transient", "realised_transient"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transient:
    """The identity's two sides: predicted -I * (l / mu - 1) / (K * N), and mean / mu - 1."""

    in_flight: int
    in_flight_mean: float
    """l, in tokens; mu where nothing is in flight."""
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

    With the mean of all that was launched until then as mu, which is the default, both sides are
    equal: that checks the bookkeeping. With the law's they differ by the chance of the prompts.

    Args:
        lengths: final ones, int64 [n].
        delivered_in: the batch of each, from 0.
        launched_in: the batch in work at its launch, from 0.
        batches: of those delivered, at least 1.
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
    """The same while the run goes on, with l from the mean rests given the tokens so far.

    Args:
        delivered: lengths int64 [n].
        tokens, finished: int64 [I] and bool [I] of what is in flight.
        mean: mu; the estimated law's by default, with which both sides are equal, because the
            estimate redistributes what is censored (Efron's self-consistency).
    """
    ended = np.concatenate((np.ones(delivered.size, dtype=np.bool_), finished))
    law = kaplan_meier(np.concatenate((delivered, tokens)), ~ended)
    mu = law.mean() if mean is None else mean
    final = expected_lengths(law, tokens, finished)
    expected = float(final.mean()) if final.size else mu
    return Transient(
        in_flight=final.size,
        in_flight_mean=expected,
        predicted=bias_without(final.size, expected, delivered.size, mu),
        measured=float(delivered.mean()) / mu - 1,
    )
