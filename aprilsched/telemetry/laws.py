"""Turns length laws into figures, and computes staleness by length. The functions are pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.identity import expected_lengths
from aprilsched.core.lengths.kaplan_meier import KaplanMeier, kaplan_meier
from aprilsched.telemetry.figures import DecileFigures, InFlightFigures, LawFigures

__all__ = ["deciles", "in_flight_figures", "law_figures", "sample_law"]

_PERCENTILES = np.arange(1, 101) / 100
_DECILES = 10


def law_figures(law: KaplanMeier) -> LawFigures:
    """The figures of an estimated law."""
    percentiles = law.quantile(_PERCENTILES)
    return LawFigures(
        mean=law.mean(),
        p50=float(percentiles[49]),
        p90=float(percentiles[89]),
        p99=float(percentiles[98]),
        percentiles=percentiles.tolist(),
        responses=law.observations,
        unresolved=law.tail,
    )


def sample_law(lengths: NDArray[np.int64]) -> LawFigures | None:
    """The figures of the lengths int64 [n] of responses that have all ended; None if there is none.

    A response without tokens (its episode has only tokens of the environment) counts as one token.
    """
    if not lengths.size:
        return None
    return law_figures(kaplan_meier(np.maximum(lengths, 1), np.zeros(lengths.size, dtype=np.bool_)))


def in_flight_figures(
    law: KaplanMeier, tokens: NDArray[np.int64], finished: NDArray[np.bool_]
) -> InFlightFigures:
    """The figures of responses with lengths int64 [n] so far, of which bool [n] have ended."""
    final = expected_lengths(law, tokens, finished)
    some = tokens.size > 0
    return InFlightFigures(
        rollouts=tokens.size,
        unfinished=int((~finished).sum()),
        mean_tokens_so_far=float(tokens.mean()) if some else 0.0,
        expected_mean_length=float(final.mean()) if some else 0.0,
    )


def deciles(
    lengths: NDArray[np.int64],
    sampled: NDArray[np.int64],
    off_policy: NDArray[np.int64],
    staleness: NDArray[np.int64],
) -> DecileFigures | None:
    """Staleness by length; None for fewer than 10 responses.

    All arguments are int64 [n] with one entry for each response: its length, the number of its
    sampled tokens, the number of those that an older policy sampled, and the sum of their
    staleness.
    """
    if lengths.size < _DECILES:
        return None
    parts = np.array_split(np.argsort(lengths, kind="stable"), _DECILES)
    tokens = [max(1, int(sampled[part].sum())) for part in parts]
    return DecileFigures(
        mean_length=[float(lengths[part].mean()) for part in parts],
        staleness_mean=_shares(staleness, parts, tokens),
        off_policy_token_share=_shares(off_policy, parts, tokens),
    )


def _shares(
    values: NDArray[np.int64], parts: list[NDArray[np.int64]], tokens: list[int]
) -> list[float]:
    return [int(values[part].sum()) / n for part, n in zip(parts, tokens, strict=True)]
