"""Length buckets: of the open groups, those of like expected length run together.

More groups are kept open than run. At each batch's begin those run that are expected to need
about the same number of further steps, so that no batch waits for one long response and few
siblings of a long one go stale in vain. What is not chosen is deferred: it waits with its tokens,
which cost nothing until it runs again. Of every deferred group some members run once as probes:
half of a response's log variance is typically its prompt's, so one finished sibling tells a lot.

What a group is expected to need: :func:`aprilsched.core.lengths.log_law.rest_of_groups`. Found by
search over schedules on the built-in workload (experiments/frontier).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.log_law import rest_of_groups
from aprilsched.core.policies.bounds import AT_LEAST_0, AT_LEAST_1
from aprilsched.core.policies.refill import OpenGroups, PoolView, Refill

__all__ = ["LengthBuckets", "window"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBuckets(Refill):
    """Of a store of open groups those of like expected length run together. How many of them run
    is the over-provision ratio's."""

    name: ClassVar[str] = "buckets"
    defers: ClassVar[bool] = True

    store: Annotated[float, AT_LEAST_1] = 5.0
    """Groups kept open, in batches."""
    probes: Annotated[int, AT_LEAST_0] = 1
    """Members of a deferred group that run once, as evidence of its length."""
    oldest: Annotated[int, AT_LEAST_1] = 16
    """Batches after its first token at which a group runs, whatever its length: the bound on
    staleness, but for the batches that it then takes."""

    def launches(self, view: PoolView) -> int:
        """Groups to open.

        Within a batch only if none is left: all were rejected, or were too few of the samples or
        tokens that fill it, and the trainer would wait for ever.
        """
        dry = view.batch_open and view.open_groups == 0
        if not (view.wave_due or dry):
            return 0
        return max(0, math.ceil(self.store * view.batch_groups - 1e-9) - view.open_groups)

    def members(self, groups: OpenGroups) -> NDArray[np.int64]:
        waiting = np.flatnonzero(~groups.running)
        rest = rest_of_groups(groups.tokens[waiting], groups.finished[waiting], groups.law)
        count = max(1, groups.wanted - (len(groups.ages) - len(waiting)))
        begun = groups.since_first_run >= 0
        runs = groups.running | (begun & (groups.since_first_run >= self.oldest))
        runs[waiting[window(rest, groups.ages[waiting], count)]] = True
        # At most half of a group is probed, or a lone sample, or a pair, would be run whole as
        # its own probe.
        probes = np.where(begun, 0, np.minimum(self.probes, groups.sizes // 2))
        return np.where(runs, groups.sizes, probes)

    def told(self, ratio: str) -> str:
        return f"rounds of {ratio} batches of like length, out of {self.store:g} open ones"


def window(rest: NDArray[np.float64], age: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The `count` groups of neighbouring `rest` that have waited longest in the mean.

    Places int64 in the arguments, float64 [G] and int64 [G] (batches since they were opened).
    """
    order = np.argsort(rest, kind="stable")
    if count >= len(order):
        return order
    if count <= 0:
        return order[:0]
    sums = np.concatenate(([0], np.cumsum(age[order])))
    first = int(np.argmax(sums[count:] - sums[:-count]))
    return order[first : first + count]
