"""Refill rules: when new groups are started, and which of the open groups run.

Each request that arrives costs the running ones a prefill pass (19 ms for a 4B model, hazard 15 of
``aprilsched doctor``), so single requests that arrive one after the other can cost a third of the
throughput. All rules start whole groups, and many of them together.

A new rule is a subclass of :class:`Refill` in a file of its own, and a line in
:mod:`aprilsched.kernel.core.policies.kinds` if it shall have a name on the command line and in stores.
Nothing else asks for a rule's type: the scheduler and the trials of automatic over-provisioning
know :class:`Refill` alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.laws import Levels, LogLaw, rest_of_groups
from aprilsched.kernel.values.bounds import AT_LEAST_0, AT_LEAST_1, SHARE, SHARE_OR_0
from aprilsched.kernel.values.checks import suggesting

_UNBOUNDED = 2**31 - 1


# Not frozen, because it is made at most events of a run, and a frozen one takes thrice as long.
@dataclass(kw_only=True, slots=True)
class PoolView:
    """What a refill rule sees of the scheduler."""

    batch_groups: int
    """Number of groups in a batch; if samples or tokens fill it, the number that it is expected to
    take."""
    group_size: float
    """Number of rollouts of a group; the mean if prompts have sizes of their own."""
    target_groups: int
    """Number of groups that should be open for a batch, by the over-provision ratio."""
    open_groups: int
    """Number of groups that still generate."""
    ready_groups: int
    """Number of groups that are complete, not rejected and not delivered; if samples or tokens fill
    a batch, the number of groups of the expected size that hold as much."""
    in_flight: int
    """Number of rollouts that still generate."""
    put_aside: int = 0
    """Number of open groups that ran in an earlier batch and did not end in it. It is counted only
    when a batch begins, and only for a rule that defers groups."""
    wave_due: bool
    """Whether a batch begins."""
    batch_open: bool
    """Whether the batch in work is not full yet."""
    asynchronous: bool
    """Whether generation continues behind a full batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenGroups:
    """What a rule that defers groups sees of the open groups when a batch begins.

    Each array has one row for each group.
    """

    tokens: NDArray[np.int64]
    """Number of tokens of each member so far, int64 [groups, members]; 0 for a member that was not
    started."""
    finished: NDArray[np.bool_]
    """Whether each member has finished, bool [groups, members]; also True where a smaller group has
    no member."""
    sizes: NDArray[np.int64]
    """Number of members of each group, int64 [groups]."""
    ages: NDArray[np.int64]
    """Number of batches since each group was opened, int64 [groups]."""
    since_first_run: NDArray[np.int64]
    """Number of batches since a member of each group first ran, int64 [groups]; -1 if none has."""
    running: NDArray[np.bool_]
    """Whether an engine has a member of each group, bool [groups]."""
    wanted: int
    """Number of groups that should run for the batch, by the over-provision ratio."""
    lacking: int = 0
    """Number of groups that the batch still takes."""
    tail: bool = False
    """Whether the batch nears its end, and the rule is asked a second time."""
    law: LogLaw
    """The law of the lengths, as far as they are known."""
    levels: Levels | None = None
    """What earlier epochs of the same prompts say of the groups; None for nothing."""


class Refill(ABC):
    """A refill rule. A rule is a frozen dataclass of its settings."""

    __slots__ = ()

    name: ClassVar[str]
    """Name of the rule in flags, config.toml and stores."""
    defers: ClassVar[bool] = False
    """Whether more groups are open than run. If so, a rollout waits with its tokens until
    :meth:`members` starts it, and is called back when its batch is full."""
    settles: ClassVar[bool] = False
    """Whether every group comes to its end after a bounded number of batches, however many of those
    that run for a batch do not end in it."""

    @property
    def tail_begins(self) -> float | None:
        """Share of a batch's rollouts that have ended when :meth:`members` is asked a second time,
        what shall run in the batch's tail; None if it is not."""
        return None

    @abstractmethod
    def launches(self, view: PoolView) -> int:
        """Number of groups to start now."""

    def members(self, groups: OpenGroups) -> NDArray[np.int64]:
        """Number of members of each group that run now, from its first one on, int64 [groups].

        Only a rule that defers groups is asked this: when a batch begins, when its tail begins, and
        when everything that was started has ended.
        """
        raise NotImplementedError(f"{type(self).__name__} defers nothing")

    @abstractmethod
    def told(self, ratio: str) -> str:
        """What the rule does with `ratio` batches of groups, in a few words."""


# --- wave ----------------------------------------------------------------------------------------

# One wave of groups at the begin of each batch.


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Wave(Refill):
    """Starts groups once, when a batch begins, as APRIL and slime do; carried rollouts count.

    Within a batch it only replaces the groups that were rejected or failed, times the
    over-provision ratio. It never starts a full extra wave.
    """

    name: ClassVar[str] = "wave"

    def launches(self, view: PoolView) -> int:
        have = view.open_groups + view.ready_groups
        if view.wave_due:
            return max(0, view.target_groups - have)
        if not view.batch_open:
            return 0
        short = view.batch_groups - have
        if view.open_groups == 0:
            # Everything is in, and the batch is still not full.
            short = max(short, 1)
        if short <= 0:
            return 0
        return math.ceil(short * view.target_groups / view.batch_groups)

    def told(self, ratio: str) -> str:
        return f"waves of {ratio} batches"


# --- pool ----------------------------------------------------------------------------------------

# A constant number of rollouts in flight.


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Pool(Refill):
    """Keeps the same number of rollouts generating, and refills several groups together.

    Refilling may end before a batch is full (a taper). A rollout that is started near the end of a
    batch is interrupted soon, so with "recompute" it costs more prefill than it fills idle steps.
    """

    name: ClassVar[str] = "pool"

    together: Annotated[int, AT_LEAST_1] = 4
    """Number of groups that are started together. Starting them one by one costs a third of the
    throughput."""
    until: Annotated[float, SHARE] = 1.0
    """Share of a batch that is complete when its pool is no longer refilled."""

    def launches(self, view: PoolView) -> int:
        if not (view.batch_open or view.wave_due or view.asynchronous):
            return 0
        if not view.wave_due and view.batch_open and self._tapers(view):
            return 0
        # An automatic schedule may have made the pool smaller than what is in it.
        free = max(0, view.target_groups * view.group_size - view.in_flight)
        together = min(self.together, view.target_groups)
        return int(free // (together * view.group_size)) * together

    def _tapers(self, view: PoolView) -> bool:
        # As long as something generates, the batch fills without new groups.
        return view.ready_groups >= self.until * view.batch_groups and view.in_flight > 0

    def told(self, ratio: str) -> str:
        taper = "" if self.until == 1 else f" until {self.until:.0%} of a batch is complete"
        return f"a pool of {ratio} batches, refilled {self.together} groups together{taper}"


# --- tail batching -------------------------------------------------------------------------------

# Tail batching: groups race for their batch, and the losers share a batch without a race.
#
# A short batch starts more groups than it takes, by the over-provision ratio, and the first that
# are complete win. The others are put aside. As soon as a whole batch of them is put aside, the
# next batch is a long one: it runs the oldest of these groups, and waits for all of them. So the
# engines wait for long responses in one batch of several, and no prompt is lost.
#
# With ratio r, a batch of B groups puts (r - 1) B of them aside, so of 1 / (r - 1) + 1 batches one
# is long. A group that was put aside runs to its end at most ceil(1 / (r - 1)) + 2 batches later,
# unless groups are dropped or prompts end.
#
# If the bound on staleness allows it, a group that was put aside keeps its tokens and goes on in
# its long batch. With ``Staleness(0, rule="restart")`` they are thrown away at the update, and all
# tokens of a batch are of its version (RollPacker, arXiv 2509.21009). The second response to a
# prompt is then drawn again, although the first one lost because it was long. This makes what is
# delivered too short for good; docs/bias.md says by how much.


@dataclass(frozen=True, kw_only=True, slots=True)
class OnDemand(Refill):
    """Starts every prompt that is there: the trainer or the clients decide how many there are."""

    name: ClassVar[str] = "on_demand"

    limit: Annotated[int, AT_LEAST_1] = _UNBOUNDED
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
    runs |= _oldest(among & ~runs, ages, max(0, most - int(np.count_nonzero(runs))))


# --- length buckets ------------------------------------------------------------------------------

# Length buckets: of the open groups, those of similar expected length run together.
#
# More groups are kept open than run. When a batch begins, those groups run that are expected to
# need about the same number of further steps. So no batch waits for one long response, and few
# siblings of a long response become stale for nothing. The groups that are not chosen are
# deferred: they wait with their tokens, which cost nothing until the groups run again. Some
# members of each deferred group run once as probes, because one finished sibling tells much about
# a length: typically half of the variance of a response's log length comes from its prompt. A
# group whose prompt was seen in an earlier epoch is not probed if what is remembered of it says
# more than a probe would.
#
# A batch that takes all groups that run for it (ratio 1) has no stale token, and groups of similar
# length wait less for each other. With ``Staleness(0, rule="restart")`` the tokens of the probes
# are thrown away at the update, and what they say of their prompts is remembered by the prompts'
# keys. What is delivered is then drawn after it was chosen, so its lengths are not biased. Probes
# cost least in the tail of a batch (`probe_after`), where an engine has free slots.
#
# The groups of a bucket end together, so batches are all short or all long.
#
# :func:`aprilsched.kernel.core.lengths.laws.rest_of_groups` estimates what a group still needs. The
# rule was found by a search over schedules on the built-in workload (experiments/frontier).


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBuckets(Refill):
    """Keeps more groups open than run, and runs those of similar expected length together. The
    over-provision ratio says how many of them run."""

    name: ClassVar[str] = "buckets"
    defers: ClassVar[bool] = True

    store: Annotated[float, AT_LEAST_1] = 5.0
    """Number of batches of groups that are kept open."""
    probes: Annotated[int, AT_LEAST_0] = 1
    """Number of members of a deferred group that run once, as evidence of its length."""
    oldest: Annotated[int, AT_LEAST_1] = 16
    """Number of batches after its first token at which a group runs, whatever its length. This
    bounds the staleness of its tokens, except for the batches that it then takes."""
    probe_after: Annotated[float, SHARE_OR_0] = 0.0
    """Share of a batch's rollouts that have ended when the probes start; 0 starts them with the
    batch. Probes that start late have less time, and take less of the others' time."""

    @property
    def tail_begins(self) -> float | None:
        return self.probe_after or None

    def launches(self, view: PoolView) -> int:
        """Number of groups to open now.

        Within a batch this is 0 as long as a group is open. If none is left (all were rejected, or
        did not have enough samples or tokens for the batch), the trainer would wait for ever.
        """
        dry = view.batch_open and view.open_groups == 0
        if not (view.wave_due or dry):
            return 0
        return max(0, math.ceil(self.store * view.batch_groups - 1e-9) - view.open_groups)

    def members(self, groups: OpenGroups) -> NDArray[np.int64]:
        begun = groups.since_first_run >= 0
        # At most half of a group is probed, or a lone sample, or a pair, would be run whole as
        # its own probe.
        probes = np.where(begun | _known(groups), 0, np.minimum(self.probes, groups.sizes // 2))
        if groups.tail:
            return np.where(groups.running, groups.sizes, probes)
        if self.probe_after:
            probes = np.zeros_like(probes)
        overdue = begun & (groups.since_first_run >= self.oldest) & ~groups.running
        count = max(1, groups.wanted - int(groups.running.sum()))
        if groups.wanted <= groups.lacking:
            # Every group that runs is waited for, so no more may run than the batch takes.
            overdue = _oldest(overdue, groups.ages, count)
            count -= int(overdue.sum())
            waiting = np.flatnonzero(~groups.running & ~overdue)
        else:
            waiting = np.flatnonzero(~groups.running)
        levels = None if groups.levels is None else groups.levels.of(waiting)
        rest = rest_of_groups(groups.tokens[waiting], groups.finished[waiting], groups.law, levels)
        runs = groups.running | overdue
        runs[waiting[window(rest, groups.ages[waiting], count)]] = True
        return np.where(runs, groups.sizes, probes)

    def told(self, ratio: str) -> str:
        return f"{ratio} batches of groups of similar length, out of {self.store:g} open batches"


def _known(groups: OpenGroups) -> NDArray[np.bool_]:
    """Whether earlier epochs say more of a group than a probe would, bool [G]: one sibling leaves
    1 - w of what the group's level varies by, where w is the law's share."""
    if groups.levels is None:
        return np.zeros(len(groups.sizes), dtype=np.bool_)
    law = groups.law
    after_probe = (1 - law.shared) * law.shared * law.deviation**2
    return groups.levels.variance[:, 0] <= after_probe


def _oldest(among: NDArray[np.bool_], ages: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """The oldest groups `among` these, at most `most`, bool [G]."""
    places = np.flatnonzero(among)
    chosen = np.zeros_like(among)
    chosen[places[np.argsort(-ages[places], kind="stable")[:most]]] = True
    return chosen


def window(rest: NDArray[np.float64], age: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The `count` groups with neighbouring values of `rest` whose mean age is highest.

    Args:
        rest: what each group is expected to need still, float64 [G].
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
