"""The objective of automatic scheduling: useful work per time of whole steps.

A step is everything from one batch to the next: generation, the pause, the refit, the recomputation
of contexts, and the trainer's own time unless generation continues during it. Its useful work is

    sum over its tokens of w * exp(-k / staleness_scale), times (1 - distance_price * d)

where w is the token's share of T_bound, k its staleness in versions, and d the distance of the
batch's lengths from the length distribution, beyond the distance of a batch drawn at random. A
token beyond the bound on staleness has loss mask 0 and is worthless.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from aprilsched.kernel.values.bounds import ABOVE_0, SHARE_OR_0
from aprilsched.kernel.values.checks import suggesting


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The cost of a stale token and of a batch of unusual lengths to a training run."""

    staleness_scale: Annotated[float, ABOVE_0] = 100.0
    """Staleness in versions at which a token is worth 1/e of a fresh one; ``math.inf`` if staleness
    costs nothing. The default is the highest price within the interval that experiments/learning
    measured with decoupled PPO (1 % for each version); the estimated cost itself is 0. With PPO's
    clip around the sampling policy it measured 17 (15 to 19), so set that for such a loss."""
    distance_price: Annotated[float, SHARE_OR_0] = 0.1
    """Share of a batch's worth that is lost if its lengths are as far from the length
    distribution as possible (a distance of 1, beyond that of a batch drawn at random); 0 if that
    costs nothing.
    experiments/learning could not detect a cost, so the default only decides between schedules that
    are otherwise nearly as good."""
    tolerance: Annotated[float, SHARE_OR_0] = 0.01
    """Share of the useful work per second that may be given up for a lower mean staleness. Optima
    are flat: many schedules are as good as the best one within noise, with very different
    staleness."""

    def usefulness(self, tokens_by_staleness: Mapping[int, float], *, bound: int | None) -> float:
        """Return the mean usefulness of the tokens, from 0 to 1; without tokens it is 1.

        Args:
            tokens_by_staleness: number of tokens by their staleness in versions.
            bound: staleness beyond which tokens have loss mask 0; None without one.
        """
        total = sum(tokens_by_staleness.values())
        if not total:
            return 1.0
        counts = {k: n for k, n in tokens_by_staleness.items() if bound is None or k <= bound}
        return sum(n * math.exp(-k / self.staleness_scale) for k, n in counts.items()) / total

    def share_left(self, distance: float, iid_distance: float) -> float:
        """Return the share of a batch's worth that remains, given the distance of its lengths.

        `distance` is from the length distribution; `iid_distance` is that of a batch drawn at
        random.
        """
        return 1 - self.distance_price * max(0.0, distance - iid_distance)
