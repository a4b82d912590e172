"""Random draws from the lengths and times of a setting, the same for every schedule.

Otherwise schedules would also differ by chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.log_lengths import normal_quantile
from aprilsched.kernel.core.lengths.observed import hashed_uniforms, resampled
from aprilsched.planning.setting import Setting
from aprilsched.planning.trial_groups import TrialGroup


class Times:
    """Equally likely times, the same for a response under every schedule."""

    def __init__(self, times: Sequence[float], *, seed: int) -> None:
        self._times = times
        self._uniforms = hashed_uniforms((997,), seed=seed).tolist()

    def of(self, row: int, member: int = 0, tokens: int = 0) -> float:
        """Return the time of a group's member at `tokens` tokens."""
        return self._times[int(self._uniform(row, member, tokens) * len(self._times))]

    def whole(self, mean: float, row: int, member: int) -> int:
        """Return `mean` rounded down or up at random, so that `mean` is the mean of all members."""
        return int(mean + self._uniform(row, member, 0))

    def _uniform(self, row: int, member: int, tokens: int) -> float:
        return self._uniforms[(131 * row + 17 * member + tokens) % len(self._uniforms)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """Draws that the trials of all schedules share; copies would take most of a choice's memory.

    Attributes:
        rows: the lengths of the members of each group.
        again: the lengths of the members of each group if the group restarts.
        remembered: evidence of earlier epochs on each group's level; empty for none.
        verdicts: for each group whether it is accepted, or whether each of its samples is; empty if
            all are.
        distribution: int64, all lengths in ascending order.
        siblings: number of siblings of a single sample; None for whole groups.
        mean_gaps: mean number of gaps of a response.
        rewards: times of rewards; None if they take no time, as for the others.
        gaps: lengths of the gaps between turns.
        ends: times from the last turn of a response until it is complete.
    """

    rows: list[list[int]]
    again: list[list[int]]
    remembered: list[tuple[float, float]]
    verdicts: list[list[bool]]
    distribution: NDArray[np.int64]
    siblings: int | None
    mean_gaps: float
    rewards: Times | None
    gaps: Times | None
    ends: Times | None

    @staticmethod
    def of(setting: Setting) -> Draws:
        rows, lengths = _rows(setting.lengths), setting.lengths
        shares = setting.shares_accepted
        verdicts = hashed_uniforms(shares.shape, seed=6) < shares
        return Draws(
            rows=rows,
            # Discarded responses are drawn again, so they get other lengths.
            again=_rows(drawn_again(setting)) if setting.restarts else rows,
            remembered=_remembered(setting) if setting.remembered else [],
            verdicts=[] if verdicts.all() else verdicts.tolist(),
            distribution=np.sort(lengths[lengths > 0]),
            siblings=setting.siblings,
            mean_gaps=setting.gaps,
            rewards=Times(setting.reward_times, seed=7) if setting.reward_times else None,
            gaps=Times(setting.gap_times, seed=8) if setting.gap_times else None,
            ends=Times(setting.end_times, seed=9) if setting.end_times else None,
        )

    def group(self, number: int, opened: int) -> TrialGroup:
        """Return group `number`, which is opened in the batch `opened`."""
        row = number % len(self.rows)
        lengths = self.again[row]
        return TrialGroup(
            lengths=lengths,
            later=self.rows[row],
            opened=opened,
            row=row,
            level=self.remembered[row] if self.remembered else None,
            siblings=self.siblings,
            gaps=None
            if self.gaps is None
            else [self.gaps.whole(self.mean_gaps, row, m) for m in range(len(lengths))],
        )

    def accepts(self, unit: TrialGroup) -> bool:
        """Return whether a group or a single sample is accepted when it is scored."""
        return not self.verdicts or self.verdicts[unit.row][unit.place]

    def distance(self, groups: Sequence[TrialGroup]) -> float:
        """Return Kolmogorov's distance of the lengths of a batch from the distribution, 0 to 1."""
        lengths = np.sort(np.array([n for group in groups for n in group.lengths]))
        dist = np.searchsorted(self.distribution, lengths, side="right") / len(self.distribution)
        steps = np.arange(len(lengths) + 1) / len(lengths)
        return float(max(np.max(steps[1:] - dist), np.max(dist - steps[:-1])))


def drawn_again(setting: Setting) -> NDArray[np.int64]:
    """Return other lengths of the same groups, as if their prompts were generated again.

    A group keeps its level, as estimated from its members. Its members get the deviations of
    another group's members from their mean, plus a random deviation of the mean itself. Each result
    is then replaced by the setting's length of the same rank, so that both have the same
    distribution. With a longer tail than the distribution's, waiting would be forecast to take 1.5
    times as long.
    """
    lengths = setting.lengths
    there = lengths > 0
    levels, means = _levels_of(setting)
    sizes = there.sum(axis=1, keepdims=True)
    logs = np.log(np.maximum(lengths, 1))
    own = np.where(there, logs - means, 0.0)
    # Deviations from a group's own mean sum to 0, so they lack the random deviation of the mean.
    luck = normal_quantile(hashed_uniforms(means.shape, seed=5))
    luck *= np.sqrt((1 - setting.shared) / sizes) * float(logs[there].std())
    others = resampled(len(lengths), len(lengths), seed=2)
    drawn = (levels + luck + own[others])[there]
    again = np.zeros_like(lengths)
    ranks = np.argsort(np.argsort(drawn, kind="stable"), kind="stable")
    again[there] = np.sort(lengths[there])[ranks]
    return again


def _levels_of(setting: Setting) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a level of each group and the mean of its log lengths, both float64 [G, 1].

    The level is drawn from its posterior, given the group's members. The level is not the mean,
    because the mean includes the members' random deviations. With the mean, a redrawn response
    would carry information on its siblings that a real response does not carry.
    """
    lengths, shared = setting.lengths, setting.shared
    there = lengths > 0
    logs = np.log(np.maximum(lengths, 1))
    sizes = there.sum(axis=1, keepdims=True)
    means = np.where(there, logs, 0.0).sum(axis=1, keepdims=True) / sizes
    grand = float(logs[there].mean())
    # The mean of g members varies by the share w of the level and (1 - w) / g of their own.
    known = shared / (shared + (1 - shared) / sizes)
    unknown = np.sqrt(shared * (1 - known)) * float(logs[there].std())
    luck = normal_quantile(hashed_uniforms(means.shape, seed=4))
    return grand + known * (means - grand) + unknown * luck, means


def _remembered(setting: Setting) -> list[tuple[float, float]]:
    """Return means and variances of the groups' levels, as estimated from earlier epochs.

    Earlier epochs explain the share `remembered` of the levels' variance.
    """
    levels, _ = _levels_of(setting)
    explained, grand = setting.remembered, float(levels.mean())
    common = max(float(levels.var()), 1e-6)
    noise = levels[resampled(len(levels), len(levels), seed=3)] - grand
    means = grand + explained * (levels - grand)
    means += math.sqrt(explained * (1 - explained)) * noise
    return [(mean, common * (1 - explained)) for mean in means[:, 0].tolist()]


def _rows(lengths: NDArray[np.int64]) -> list[list[int]]:
    return [[length for length in row if length] for row in lengths.tolist()]
