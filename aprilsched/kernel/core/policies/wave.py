"""One wave of groups at the start of each batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from aprilsched.kernel.core.policies.refill import PoolView, Refill
from aprilsched.kernel.values.checks import suggesting


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Wave(Refill):
    """Starts groups once, when a batch starts, as APRIL and slime do; carried rollouts count.

    Within a batch it only replaces rejected or failed groups, times the over-provision ratio. It
    never starts a full extra wave.
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
            # All groups have ended, and the batch is still not full.
            short = max(short, 1)
        if short <= 0:
            return 0
        return math.ceil(short * view.target_groups / view.batch_groups)

    def describe(self, ratio: str) -> str:
        return f"waves of {ratio} batches"
