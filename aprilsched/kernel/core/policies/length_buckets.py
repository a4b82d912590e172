"""Length buckets: of the open groups, those of similar expected length run together.

More groups are kept open than run. When a batch starts, the groups run that are expected to need
about the same number of further steps. So no batch waits for one long response, and few siblings of
a long response become stale for nothing. The other groups are deferred: they wait with their
tokens, which cost nothing until the groups run again.

Some members of each deferred group run once as probes, because one finished sibling is strong
evidence of a length: typically half of the variance of a response's log length comes from its
prompt. A group whose prompt was seen in an earlier epoch is not probed if the records of that epoch
are stronger evidence than a probe.

A batch that takes all groups that run for it (ratio 1) has no stale token, and groups of similar
length wait less for each other. With ``Staleness(0, rule="restart")`` the tokens of the probes are
discarded at the update, and their lengths are remembered under the prompts' keys. The delivered
responses are then drawn after their groups were chosen, so their lengths are not biased. Probes
cost least in the tail of a batch (`probe_after`), when an engine has free slots.

The groups of a bucket end together, so batches are all short or all long.

:func:`aprilsched.kernel.core.lengths.log_lengths.rest_of_groups` estimates how many more steps a
group needs. The rule was found by a search over schedules on the built-in workload
(`experiments/frontier` at commit 352eea8a).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.log_lengths import rest_of_groups
from aprilsched.kernel.core.policies.refill import OpenGroups, PoolView, Refill
from aprilsched.kernel.values.bounds import AT_LEAST_0, AT_LEAST_1, SHARE_OR_0
from aprilsched.kernel.values.checks import suggesting


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBuckets(Refill):
    """Keeps more groups open than run, and runs those of similar expected length together.

    The over-provision ratio determines how many of them run."""

    name: ClassVar[str] = "buckets"
    defers: ClassVar[bool] = True

    store: Annotated[float, AT_LEAST_1] = 5.0
    """Number of open groups, in batches."""
    probes: Annotated[int, AT_LEAST_0] = 1
    """Number of members of a deferred group that run once, as evidence of its length."""
    oldest: Annotated[int, AT_LEAST_1] = 16
    """Number of batches after its first token at which a group runs, whatever its length. This
    bounds the staleness of its tokens, except for the batches that it then takes."""
    probe_after: Annotated[float, SHARE_OR_0] = 0.0
    """Share of a batch's rollouts that have ended when the probes start; 0 starts them with the
    batch. Late probes have less time, and take less time from other requests."""

    @property
    def tail_begins(self) -> float | None:
        return self.probe_after or None

    def launches(self, view: PoolView) -> int:
        """Return the number of groups to open now.

        Within a batch this is 0 as long as a group is open. If none is left, because all were
        rejected or had too few samples or tokens for the batch, new groups open. Otherwise the
        trainer would wait forever.
        """
        dry = view.batch_open and view.open_groups == 0
        if not (view.wave_due or dry):
            return 0
        return max(0, math.ceil(self.store * view.batch_groups - 1e-9) - view.open_groups)

    def members(self, groups: OpenGroups) -> NDArray[np.int64]:
        ran = groups.since_first_run >= 0
        # Probe at most half of a group. Otherwise a lone sample, or a pair, would run whole as its
        # own probe.
        probes = np.where(ran | _known(groups), 0, np.minimum(self.probes, groups.sizes // 2))
        if groups.tail:
            return np.where(groups.running, groups.sizes, probes)
        if self.probe_after:
            probes = np.zeros_like(probes)
        overdue = ran & (groups.since_first_run >= self.oldest) & ~groups.running
        count = max(1, groups.wanted - int(groups.running.sum()))
        if groups.wanted <= groups.lacking:
            # The batch waits for every group that runs, so no more may run than it takes.
            overdue = oldest_of(overdue, groups.ages, count)
            count -= int(overdue.sum())
            waiting = np.flatnonzero(~groups.running & ~overdue)
        else:
            waiting = np.flatnonzero(~groups.running)
        levels = None if groups.levels is None else groups.levels.of(waiting)
        rest = rest_of_groups(
            groups.tokens[waiting], groups.finished[waiting], groups.log_lengths, levels
        )
        runs = groups.running | overdue
        runs[waiting[window(rest, groups.ages[waiting], count)]] = True
        return np.where(runs, groups.sizes, probes)

    def describe(self, ratio: str) -> str:
        return f"{ratio} batches of groups of similar length, out of {self.store:g} open batches"


def _known(groups: OpenGroups) -> NDArray[np.bool_]:
    """Return whether earlier epochs are stronger evidence on a group than a probe, bool [G].

    One finished sibling leaves 1 - w of the variance of the group's level, where w is the
    distribution's share.
    """
    if groups.levels is None:
        return np.zeros(len(groups.sizes), dtype=np.bool_)
    dist = groups.log_lengths
    after_probe = (1 - dist.shared) * dist.shared * dist.deviation**2
    return groups.levels.variance[:, 0] <= after_probe


def oldest_of(among: NDArray[np.bool_], ages: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """Return the oldest groups `among` these, at most `most`, bool [G]."""
    places = np.flatnonzero(among)
    chosen = np.zeros_like(among)
    chosen[places[np.argsort(-ages[places], kind="stable")[:most]]] = True
    return chosen


def window(rest: NDArray[np.float64], age: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the `count` groups with neighbouring values of `rest` whose mean age is highest.

    Args:
        rest: number of steps that each group is expected to need still, float64 [G].
        age: number of batches since each group was opened, int64 [G].
        count: number of groups to choose.

    Returns:
        Indices of the groups, int64 [count].
    """
    order = np.argsort(rest, kind="stable")
    if count >= len(order):
        return order
    if count <= 0:
        return order[:0]
    sums = np.concatenate(([0], np.cumsum(age[order])))
    first = int(np.argmax(sums[count:] - sums[:-count]))
    return order[first : first + count]
