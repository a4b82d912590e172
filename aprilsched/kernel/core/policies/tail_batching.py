"""Tail batching: groups race for their batch, and the losers share a batch without a race.

A short batch starts more groups than it takes, by the over-provision ratio, and the first that
are complete win. The others are put aside. As soon as a whole batch of them is put aside, the
next batch is a long one: it runs the oldest of these groups, and waits for all of them. So the
engines wait for long responses in one batch of several, and no prompt is lost.

With ratio r, a batch of B groups puts (r - 1) B of them aside, so of 1 / (r - 1) + 1 batches one
is long. A group that was put aside runs to its end at most ceil(1 / (r - 1)) + 2 batches later,
unless groups are dropped or prompts end.

If the bound on staleness allows it, a group that was put aside keeps its tokens and goes on in
its long batch. With ``Staleness(0, rule="restart")`` they are thrown away at the update, and all
tokens of a batch are of its version (RollPacker, arXiv 2509.21009). The second response to a
prompt is then drawn again, although the first one lost because it was long. This makes what is
delivered too short for good; docs/bias.md says by how much.
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
    """Starts every prompt that is there: the trainer or the clients decide how many there are."""

    name: ClassVar[str] = "on_demand"

    limit: Annotated[int, AT_LEAST_1] = UNBOUNDED
    """Largest number of rollouts in flight."""

    def launches(self, view: PoolView) -> int:
        return max(0, self.limit - view.in_flight)

    def told(self, ratio: str) -> str:
        return f"what is asked for, at most {self.limit} rollouts at a time"


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class TailBatching(Refill):
    """Lets groups race for their batch, and gathers the losers in batches without a race. The
    over-provision ratio says how many groups race."""

    name: ClassVar[str] = "tail"
    defers: ClassVar[bool] = True
    settles: ClassVar[bool] = True

    def launches(self, view: PoolView) -> int:
        """Number of groups that join the race; 0 for a long batch.

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
        # In a race these are needed only where the prompts have ended.
        _start(runs, aside, lacking, groups.ages)
        return np.where(runs, groups.sizes, 0)

    def told(self, ratio: str) -> str:
        return f"races of {ratio} batches of groups, whose losers share batches without a race"


def _start(
    runs: NDArray[np.bool_], among: NDArray[np.bool_], most: int, ages: NDArray[np.int64]
) -> None:
    """Let the oldest groups `among` those that do not run be run, until `most` groups run."""
    runs |= oldest_of(among & ~runs, ages, max(0, most - int(np.count_nonzero(runs))))
