"""Advantages of a batch, with a baseline that does not depend on the rollout itself.

The advantage of a rollout is its reward minus a baseline. The baseline is the mean reward of other
rollouts of the same prompt: for a whole group all the others (leave-one-out, RLOO, arXiv
2402.14740), for a single sample its siblings. Neither depends on the rollout's own tokens or
length, so the policy gradient is unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.errors import ConfigError
from aprilsched.types import Batch, Rollout, Sample, Sibling, Unit

Scale: TypeAlias = Literal["none", "std"]


def advantages(batch: Batch, *, scale: Scale = "none") -> NDArray[np.float64]:
    """Return the advantage of each rollout, in the order of ``batch.rollouts``.

    With "none" it is r - b: the reward minus the mean reward of the siblings. With "std" it is
    divided by the standard deviation of the siblings' rewards. That of a few siblings is often 0,
    although the rollout's own reward differs, and the quotient would be unbounded. So the variance
    is the mean over the batch, without the rollout's own group, whose rewards include its own. If
    all these variances are 0, nothing is divided. The recommended scale is "none": the others
    weigh a prompt by how far the policy has learned it (Dr. GRPO, arXiv 2503.20783).

    Args:
        batch: a batch of groups or samples. A rollout without siblings has advantage NaN.
        scale: "none" or "std".

    Returns:
        float64 [B].

    Raises:
        ConfigError: if a reward is missing, or `scale` is unknown.
    """
    if scale not in ("none", "std"):
        raise ConfigError(f'scale must be "none" or "std", got {scale!r}.')
    rewards, others = _rewards(batch.units)
    if any(np.isnan(each).any() for each in (rewards, *others)):
        raise ConfigError(
            "a rollout of the batch has no reward, so there is no baseline; give the scheduler a "
            "reward function, or let the episode return a Score."
        )
    found = rewards - _means(others)
    return found / _deviations(batch, others) if scale == "std" else found


def baselines(units: Sequence[Unit]) -> NDArray[np.float64]:
    """Return the mean reward of the siblings of each rollout, float64 [B].

    It is NaN without siblings, and if the reward of one is missing.
    """
    _, others = _rewards(units)
    return _means(others)


def _means(others: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.array([each.mean() if len(each) else math.nan for each in others])


def _rewards(units: Sequence[Unit]) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Return the reward of each rollout [B], and those of its siblings; NaN for a missing one."""
    rows = [row for unit in units for row in _of_unit(unit)]
    return np.array([row[0] for row in rows]), [np.array(row[1:]) for row in rows]


def _of_unit(unit: Unit) -> Iterator[list[float]]:
    """Yield for each rollout its reward and those of its siblings."""
    if isinstance(unit, Sample):
        yield [_reward(each) for each in (unit, *unit.siblings)]
        return
    own = [_reward(each) for each in unit.rollouts]
    for place, reward in enumerate(own):
        yield [reward, *own[:place], *own[place + 1 :]]


def _reward(of: Rollout | Sample | Sibling) -> float:
    return math.nan if of.reward is None else of.reward


def _deviations(batch: Batch, others: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return for each rollout the root of the mean variance in the other groups [B]; 1 for 0."""
    variances = np.array([each.var(ddof=1) if len(each) > 1 else 0.0 for each in others])
    groups = np.array([rollout.group_id for rollout in batch.rollouts])
    _, place = np.unique(groups, return_inverse=True)
    totals, counts = np.bincount(place, variances), np.bincount(place)
    # Sums of the groups before and after. The total minus the own sum could leave a rounding error,
    # by which the advantages would be divided if no other group has a variance.
    before = np.cumsum([0.0, *totals[:-1]])
    after = np.cumsum([0.0, *totals[:0:-1]])[::-1]
    left = len(others) - counts
    mean = np.divide(before + after, left, out=np.zeros(len(totals)), where=left > 0)[place]
    return np.where(mean > 0, np.sqrt(mean), 1.0)
