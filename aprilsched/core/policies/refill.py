"""When to start new groups, and which of the open ones run: what a refill rule is.

Every arriving request costs the running ones a prefill pass (hazard 15 of SGLang's: 19 ms for a
4B model), so a trickle of single requests can cost a third of the throughput. All rules start
whole groups, many together.

A new rule is a subclass of :class:`Refill` in a file of its own, and a line in
:mod:`aprilsched.core.policies.kinds` if it shall have a name on the command line and in stores.
Nothing else asks for a rule's type: the scheduler and the trials of automatic over-provisioning
know :class:`Refill` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.log_law import LogLaw

__all__ = ["OpenGroups", "PoolView", "Refill"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolView:
    """What a refill rule sees. `open_groups` still generate; `ready_groups` are complete, not
    rejected and not delivered; `target_groups` is the over-provisioned batch. Where a batch is
    full by samples or tokens, `batch_groups` are those that it takes, and `ready_groups` are as
    many usual groups as count as much."""

    batch_groups: int
    group_size: float
    """Rollouts of a group; their mean where prompts have sizes of their own."""
    target_groups: int
    open_groups: int
    ready_groups: int
    in_flight: int
    """Rollouts still generating."""
    wave_due: bool
    """A batch begins."""
    batch_open: bool
    """The batch in work is not full."""
    asynchronous: bool
    """Generation goes on behind a full batch."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OpenGroups:
    """What a rule that defers groups sees of the open ones when a batch begins: one row each."""

    tokens: NDArray[np.int64]
    """int64 [groups, members]: so far; 0 if the member was not started."""
    finished: NDArray[np.bool_]
    """bool [groups, members]: also where a smaller group has no member."""
    sizes: NDArray[np.int64]
    """int64 [groups]: members of each."""
    ages: NDArray[np.int64]
    """int64 [groups]: batches since it was opened."""
    since_first_run: NDArray[np.int64]
    """int64 [groups]: batches since a member first ran; -1 if none has."""
    running: NDArray[np.bool_]
    """bool [groups]: whether a member is with an engine."""
    wanted: int
    """Groups that should run for the batch."""
    law: LogLaw
    """Of the lengths, as far as they are known."""


class Refill(ABC):
    """A refill rule. Rules are frozen dataclasses of their settings."""

    __slots__ = ()

    name: ClassVar[str]
    """What the configuration calls it."""
    defers: ClassVar[bool] = False
    """More groups are open than run: a rollout waits, with its tokens, until :meth:`members`
    starts it, and is called back when its batch is full."""

    @abstractmethod
    def launches(self, view: PoolView) -> int:
        """Groups to start now."""

    def members(self, groups: OpenGroups) -> NDArray[np.int64]:
        """How many members of each group run now, from its first one on; for a rule that defers.

        Asked for when a batch begins, and when all that was started has ended.
        """
        raise NotImplementedError(f"{type(self).__name__} defers nothing")

    @abstractmethod
    def told(self, ratio: str) -> str:
        """What it does with `ratio` batches of groups, in a few words."""
