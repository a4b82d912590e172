"""A constant number of rollouts in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from aprilsched.kernel.core.policies.refill import PoolView, Refill
from aprilsched.kernel.values.bounds import AT_LEAST_1, SHARE
from aprilsched.kernel.values.checks import suggesting


@suggesting()
@dataclass(frozen=True, kw_only=True, slots=True)
class Pool(Refill):
    """Keeps the same number of rollouts generating, and refills several groups together.

    Refilling may end before a batch is full (a taper). A rollout that starts near the end of a
    batch is soon interrupted, so with "recompute" its prefill costs more than the idle steps that
    it fills.
    """

    name: ClassVar[str] = "pool"

    together: Annotated[int, AT_LEAST_1] = 4
    """Number of groups that start together. Starting them one by one costs a third of the
    throughput."""
    until: Annotated[float, SHARE] = 1.0
    """Share of a batch that is complete when its pool is no longer refilled."""

    def launches(self, view: PoolView) -> int:
        if not (view.batch_open or view.wave_due or view.asynchronous):
            return 0
        if not view.wave_due and view.batch_open and self._tapers(view):
            return 0
        # An automatic schedule may have made the pool smaller than its current content.
        free = max(0, view.target_groups * view.group_size - view.in_flight)
        together = min(self.together, view.target_groups)
        return int(free // (together * view.group_size)) * together

    def _tapers(self, view: PoolView) -> bool:
        # As long as something generates, the batch fills without new groups.
        return view.ready_groups >= self.until * view.batch_groups and view.in_flight > 0

    def describe(self, ratio: str) -> str:
        taper = "" if self.until == 1 else f" until {self.until:.0%} of a batch is complete"
        return f"a pool of {ratio} batches, refilled {self.together} groups together{taper}"
