"""When to start new groups, and how many together.

Every arriving request costs the running ones a prefill pass (hazard 15 of SGLang's: 19 ms for a
4B model), so a trickle of single requests can cost a third of the throughput. Both rules start
whole groups, many together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

__all__ = ["ConstantPool", "PoolView", "Refill", "Wave"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolView:
    """What a refill rule sees. `open_groups` still generate; `ready_groups` are complete, not
    rejected and not delivered; `target_groups` is the over-provisioned batch. Where a batch is
    full by samples or tokens, `batch_groups` are those that it takes, and `ready_groups` are as
    many usual groups as count as much."""

    batch_groups: int
    group_size: int
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


class Refill(Protocol):
    def launches(self, view: PoolView) -> int:
        """Groups to start now."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Wave:
    """One wave at the begin of each batch, as APRIL and slime do; carried rollouts count.

    Within a batch only what rejections and failures have taken is started again, times the
    over-provision ratio, never a full extra wave.
    """

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantPool:
    """Keep the same number of rollouts generating, refilled `together` groups at a time.

    `until`: the share of a batch that is complete when refilling ends for that batch (a taper).
    What is started near a batch's end is interrupted at once, so under recompute it costs more
    prefill than it fills idle steps.
    """

    together: int
    until: float = 1.0

    def launches(self, view: PoolView) -> int:
        if not (view.batch_open or view.wave_due or view.asynchronous):
            return 0
        if not view.wave_due and view.batch_open and self._tapers(view):
            return 0
        # An automatic schedule may have made the pool smaller than what is in it.
        free = max(0, view.target_groups * view.group_size - view.in_flight)
        together = min(self.together, view.target_groups)
        return free // (together * view.group_size) * together

    def _tapers(self, view: PoolView) -> bool:
        # As long as something generates, the batch fills without new groups.
        return view.ready_groups >= self.until * view.batch_groups and view.in_flight > 0
