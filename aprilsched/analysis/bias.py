"""Measures the bias of a run: conservation, laws, staleness by length and censors, from arrays
alone.

Lengths are in tokens. A bias is a share of the mean length: 0 for none, and -0.1 for 10 % short.
:mod:`aprilsched.analysis.drain` has what it costs to avoid the bias of the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aprilsched.core.lengths.laws import KaplanMeier, kaplan_meier
from aprilsched.telemetry.bias_collector import (
    bias_without,
    deciles,
    expected_lengths,
    law_figures,
    sample_law,
)
from aprilsched.telemetry.figures import LawFigures

__all__ = [
    "CensorEffect",
    "Conservation",
    "LawComparison",
    "censor_effect",
    "compare_laws",
    "conservation",
    "deciles",
    "drawn_law",
    "tokens_by_reason",
]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class CensorEffect:
    """The permanent effect of a policy that drops responses on the mean length of the others."""

    dropped: int
    shift: float
    """For example -0.1, if the remaining responses are 10 % shorter than the drawn ones."""
    warning: str | None


def censor_effect(
    law: KaplanMeier,
    tokens: NDArray[np.int64],
    finished: NDArray[np.bool_],
    *,
    kept: int,
    threshold: float = 0.01,
) -> CensorEffect:
    """Compute the effect of dropping responses with `tokens` int64 [m], which had ended or not
    (`finished`, bool [m]).

    `kept` is the number of responses that were not dropped. Shifts smaller than `threshold` give no
    warning. If the law has a tail without finished responses, the true effect is larger.
    """
    final = expected_lengths(law, tokens, finished)
    mean = law.mean()
    shift = bias_without(final.size, float(final.mean()), kept, mean) if final.size else 0.0
    text = (
        f"dropping {final.size} responses makes the other {kept} {abs(shift):.1%} "
        f"{'shorter' if shift < 0 else 'longer'} on average, and more batches will not mend it"
    )
    return CensorEffect(
        dropped=final.size, shift=shift, warning=text if abs(shift) >= threshold else None
    )


def tokens_by_reason(reasons: Sequence[str], tokens: Sequence[int]) -> Mapping[str, int]:
    """Number of tokens of the dropped rollouts, by reason."""
    totals: dict[str, int] = {}
    for reason, count in zip(reasons, tokens, strict=True):
        totals[reason] = totals.get(reason, 0) + count
    return dict(sorted(totals.items()))
