"""Computes what a run knew of its response lengths at one moment, and how well this determines the
law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aprilsched.analysis.launches import Launches
from aprilsched.analysis.run import readable
from aprilsched.core.lengths.laws import KaplanMeier, kaplan_meier
from aprilsched.core.lengths.observed import GroupLengths, pooled
from aprilsched.telemetry.event_log.reading import read_facts
from aprilsched.telemetry.run_folder import EVENTS

__all__ = ["LawBand", "known_lengths", "law_band", "law_of"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LawBand:
    """A confidence band of the law: between `low` and `high` at each of `lengths`, float64 [n], and
    with a mean between `mean_low` and `mean_high`."""

    lengths: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean_low: float
    mean_high: float


def known_lengths(folder: Path, *, until: float | None = None) -> list[GroupLengths]:
    """Groups that were launched for training in the first `until` seconds of the run in `folder`,
    with the tokens that were known then.

    The tokens of unfinished responses are exact after an update, and otherwise up to a chunk
    behind.

    Raises:
        RunFolderError: if the log is missing or cannot be understood.
    """
    launches = Launches()
    with readable(folder):
        for facts, at in read_facts(folder / EVENTS):
            if until is not None and at > until:
                break
            launches.on_facts(facts, at)
    return [
        GroupLengths(
            launched=place,
            tokens=np.array([max(m.tokens, m.finished) for m in members], dtype=np.int64),
            finished=np.array([m.finished for m in members], dtype=np.bool_),
        )
        for place, members in enumerate(launches.by_group())
    ]


def law_of(groups: Sequence[GroupLengths]) -> KaplanMeier:
    """Kaplan and Meier's estimate, in which unfinished responses are censored.

    Raises:
        ValueError: if there are no groups.
    """
    tokens, finished = pooled(groups)
    return kaplan_meier(tokens, ~finished)


def law_band(
    groups: Sequence[GroupLengths], *, level: float = 0.9, draws: int = 200, seed: int = 0
) -> LawBand:
    """A bootstrap band over whole groups. The members of a group are alike, so a formula for
    independent responses (Greenwood's) would give too narrow a band."""
    random = np.random.default_rng(seed)
    grid = np.unique(np.geomspace(1, law_of(groups).end, 120).astype(np.int64))
    laws = [law_of(_resampled(groups, random)) for _ in range(draws)]
    tails = (0.5 - level / 2, 0.5 + level / 2)
    low, high = np.quantile([law.survival_at(grid) for law in laws], tails, axis=0)
    mean_low, mean_high = np.quantile([law.mean() for law in laws], tails)
    return LawBand(
        lengths=grid, low=low, high=high, mean_low=float(mean_low), mean_high=float(mean_high)
    )


def _resampled(groups: Sequence[GroupLengths], random: np.random.Generator) -> list[GroupLengths]:
    return [groups[int(place)] for place in random.integers(0, len(groups), len(groups))]
