"""Tail batching: groups race for their batch, and the losers share a batch without a race.

A short batch starts more groups than it takes, by the over-provision ratio, and the first complete
groups win. The others are put aside. Once a whole batch of them is put aside, the next batch is a
long one: it runs the oldest of these groups, and waits for all of them. So the engines wait for
long responses in only one of several batches, and no prompt is lost.

With ratio r, a batch of B groups puts (r - 1) B of them aside, so of 1 / (r - 1) + 1 batches one is
long. A group that was put aside finishes at most ceil(1 / (r - 1)) + 2 batches later, unless groups
are dropped or prompts end.

If the bound on staleness allows it, a group that was put aside keeps its tokens and continues in
its long batch. With ``Staleness(0, rule="restart")`` they are discarded at the update, and all
tokens of a batch are of its version (RollPacker, arXiv 2509.21009). The response is then drawn
again, although the first one lost because it was long. This makes the delivered responses
permanently too short; docs/bias.md quantifies the bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.policies.length_buckets import oldest_of
from aprilsched.kernel.core.policies.refill import UNBOUNDED, OpenGroups, PoolView, Refill
from aprilsched.kernel.values.bounds import AT_LEAST_1
from aprilsched.kernel.values.checks import suggesting


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDemand(Refill):
    """Starts every available prompt: the trainer or the clients determine the number."""

    name: ClassVar[str] = "on_demand"

    limit: Annotated[int, AT_LEAST_1] = UNBOUNDED
    """Largest number of rollouts in flight."""

    def launches(self, view: PoolView) -> int:
        return max(0, self.limit - view.in_flight)

    def describe(self, ratio: str) -> str:
        return f"what is asked for, at most {self.limit} rollouts at a time"


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class TailBatching(Refill):
    """Lets groups race for their batch, and gathers the losers in batches without a race.

    The over-provision ratio determines how many groups race."""

    name: ClassVar[str] = "tail"
    defers: ClassVar[bool] = True
    settles: ClassVar[bool] = True

    def launches(self, view: PoolView) -> int:
        """Return the number of groups that join the race; 0 for a long batch.

        Within a batch this is 0 as long as a group is open. If none is left, because all were
        rejected or had too few tokens for the batch, another race fills it.
        """
        dry = view.batch_open and view.open_groups == 0
        if not (view.wave_due or dry):
            return 0
        if view.put_aside >= view.batch_groups - view.ready_groups:
            return 0
        there = view.open_groups - view.put_aside + view.ready_groups
        return max(0, view.target_groups - there)

    def members(self, groups: OpenGroups) -> NDArray[np.int64]:
        aside = groups.since_first_run >= 1
        lacking = max(1, groups.lacking)
        runs = groups.running.copy()
        if np.count_nonzero(aside) < lacking:
            _start(runs, ~aside, max(lacking, groups.wanted), groups.ages)
        # In a race these are needed only once the prompts have ended.
        _start(runs, aside, lacking, groups.ages)
        return np.where(runs, groups.sizes, 0)

    def describe(self, ratio: str) -> str:
        return f"races of {ratio} batches of groups, whose losers share batches without a race"


def _start(
    runs: NDArray[np.bool_], among: NDArray[np.bool_], most: int, ages: NDArray[np.int64]
) -> None:
    """Start the oldest idle groups `among` these until `most` groups run."""
    runs |= oldest_of(among & ~runs, ages, max(0, most - int(np.count_nonzero(runs))))
