"""Refill rules: when new groups are started, and which of the open groups run.

Each request that arrives costs the running ones a prefill pass (19 ms for a 4B model, hazard 15 of
``aprilsched doctor``), so single requests in succession can cost a third of the throughput. All
rules start whole groups, and many of them together.

A new rule is a subclass of :class:`Refill` in a separate file, and a line in
:mod:`aprilsched.kernel.core.policies.kinds` if it needs a name on the command line and in stores.
No other code depends on a rule's type: the scheduler and the trials of automatic over-provisioning
know :class:`Refill` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.log_lengths import Levels, LogLengths

UNBOUNDED = 2**31 - 1


# Not frozen, because most events create one, and a frozen one takes three times as long.
@dataclass(kw_only=True, slots=True)
class PoolView:
    """The scheduler as a refill rule sees it.

    Attributes:
        batch_groups: number of groups in a batch; the expected number if samples or tokens fill it.
        group_size: number of rollouts of a group; the mean if prompts have different sizes.
        target_groups: number of groups that should be open or ready for a batch: the ratio
            `over_provision` times `batch_groups`.
        open_groups: number of groups that still generate; no ready group is among them.
        ready_groups: number of groups that are complete, not rejected and not delivered; if samples
            or tokens fill a batch, the equivalent number of groups of the expected size.
        in_flight: number of rollouts (not groups) that still generate.
        put_aside: number of open groups that ran in an earlier batch and did not end in it. It is
            counted only when a batch starts, and only for a rule that defers groups.
        wave_due: whether a batch starts, until its groups are launched.
        batch_open: whether the batch in work is not full yet.
        asynchronous: whether generation continues after a full batch.
    """

    batch_groups: int
    group_size: float
    target_groups: int
    open_groups: int
    ready_groups: int
    in_flight: int
    put_aside: int = 0
    wave_due: bool
    batch_open: bool
    asynchronous: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenGroups:
    """The open groups as a rule that defers groups sees them.

    Each array has one row for each group.
    """

    tokens: NDArray[np.int64]
    """Number of tokens of each member so far, int64 [groups, members]; 0 for a member that has not
    started."""
    finished: NDArray[np.bool_]
    """Whether each member has finished, bool [groups, members]; also True for absent members of a
    smaller group."""
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
    """Whether the batch nears its end, and this is the second call for it."""
    log_lengths: LogLengths
    """The distribution of the lengths, as estimated so far."""
    levels: Levels | None = None
    """Levels of the groups from earlier epochs of the same prompts; None if unknown."""


class Refill(ABC):
    """A refill rule. A rule is a frozen dataclass of its settings.

    Attributes:
        name: name of the rule in flags, config.toml and stores.
        defers: whether more groups are open than run. If so, a rollout waits with its tokens until
            :meth:`members` starts it, and is aborted when its batch is full.
        settles: whether every group ends after a bounded number of batches, even if many groups
            that run for a batch do not end in it. Otherwise ``Staleness(0, rule="restart")``, which
            starts stale groups anew, might never let a group end, and may be refused.
    """

    __slots__ = ()

    name: ClassVar[str]
    defers: ClassVar[bool] = False
    settles: ClassVar[bool] = False

    @property
    def tail_begins(self) -> float | None:
        """Share of ended rollouts of a batch at which its tail starts, or None.

        :meth:`members` is then called a second time, for the groups that run in the tail. With None
        it is not.
        """
        return None

    @abstractmethod
    def launches(self, view: PoolView) -> int:
        """Return the number of groups to start now."""

    def members(self, groups: OpenGroups) -> NDArray[np.int64]:
        """Return the number of members of each group that run now, from its first one on.

        The result is int64 [groups]. Only a rule that defers groups gets this call: when a batch
        starts, when its tail starts, and when everything that was started has ended.
        """
        raise NotImplementedError(f"{type(self).__name__} defers nothing")

    @abstractmethod
    def describe(self, ratio: str) -> str:
        """Describe in a few words what the rule does with `ratio` batches of groups."""
