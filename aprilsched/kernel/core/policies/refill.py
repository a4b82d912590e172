"""Refill rules: when new groups are started, and which of the open groups run.

Each request that arrives costs the running ones a prefill pass (19 ms for a 4B model, hazard 15 of
``aprilsched doctor``), so single requests that arrive one after the other can cost a third of the
throughput. All rules start whole groups, and many of them together.

A new rule is a subclass of :class:`Refill` in a file of its own, and a line in
:mod:`aprilsched.kernel.core.policies.kinds` if it shall have a name on the command line and in
stores. Nothing else asks for a rule's type: the scheduler and the trials of automatic
over-provisioning know :class:`Refill` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.log_law import Levels, LogLaw

UNBOUNDED = 2**31 - 1


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
