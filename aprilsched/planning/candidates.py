"""The schedules that automatic over-provisioning chooses among.

Rounds are the least stale ones at each speed where what is interrupted is prefilled again, but
for low ratios and tight bounds on staleness, where waves are; pools are the fastest where the KV
is kept. Optima are flat, so the steps of the grid are as coarse as the regret that it may cost:
13 ratios from waiting to three batches.
"""

from __future__ import annotations

from aprilsched.core.policies.over_provision import FixedRatio
from aprilsched.core.policies.refill import ConstantPool, Refill, Wave
from aprilsched.core.policies.rounds import Rounds
from aprilsched.core.policies.schedule import Schedule

__all__ = ["RATIOS", "candidates", "named"]

RATIOS = (1.0, 1.0625, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0)
_POOL_RATIOS = (0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
_POOL_UNTIL = (0.25, 1.0)
_ROUND_RATIOS = (1.125, 1.25, 1.375, 1.5, 1.5625, 1.625, 1.6875, 1.75, 2.0, 2.25, 2.5, 3.0)
_STORES = (Rounds(store=5.0, oldest=16), Rounds(store=3.5, oldest=6))
_TOGETHER = 4
"""Groups of 8: one pass for 32 rollouts loses a tenth of what one for each loses."""


def candidates(*, batch_groups: int, engines: int, parks: bool) -> list[Schedule]:
    """All of them; pools refill every engine with a few groups at a time. `parks`: rounds can be
    had, which call back what they do not choose."""
    together = min(_TOGETHER * engines, batch_groups)
    refills: list[tuple[float, Refill]] = [(ratio, Wave()) for ratio in RATIOS]
    refills += [
        (ratio, ConstantPool(together=together, until=until))
        for ratio in _POOL_RATIOS
        for until in _POOL_UNTIL
    ]
    if parks:
        refills += [(ratio, store) for ratio in _ROUND_RATIOS for store in _STORES]
    return [
        Schedule(over_provision=FixedRatio(ratio=ratio), refill=refill) for ratio, refill in refills
    ]


def named(schedule: Schedule) -> str:
    """In words."""
    over, refill = schedule.over_provision, schedule.refill
    ratio = f"{over.ratio:g}" if isinstance(over, FixedRatio) else type(over).__name__
    if isinstance(refill, ConstantPool):
        taper = "" if refill.until == 1 else f" until {refill.until:.0%} of a batch is complete"
        return f"a pool of {ratio} batches, refilled {refill.together} groups together{taper}"
    if isinstance(refill, Rounds):
        return f"rounds of {ratio} batches of like length, out of {refill.store:g} open ones"
    return f"waves of {ratio} batches"
