"""The schedules that automatic scheduling tries, by what is possible in a run."""

from __future__ import annotations

from dataclasses import dataclass

from aprilsched.kernel.core.policies.length_buckets import LengthBuckets
from aprilsched.kernel.core.policies.placement import Placement
from aprilsched.kernel.core.policies.pool import Pool
from aprilsched.kernel.core.policies.refill import Refill
from aprilsched.kernel.core.policies.schedule import Pace, Schedule
from aprilsched.kernel.core.policies.tail_batching import TailBatching
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.planning.setting import Setting

RATIOS = (1.0, 1.0625, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0)
_POOL_RATIOS = (0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
_POOL_UNTIL = (0.25, 1.0)
_BUCKET_RATIOS = (1.125, 1.25, 1.375, 1.5, 1.5625, 1.625, 1.6875, 1.75, 2.0, 2.25, 2.5, 3.0)
_STORES = (LengthBuckets(store=5.0, oldest=16), LengthBuckets(store=3.5, oldest=6))
_WAITED = (
    LengthBuckets(store=2.0, probe_after=0.97),
    LengthBuckets(store=4.0, probe_after=0.97),
    LengthBuckets(store=6.0, probe_after=0.97),
)
"""Length buckets that are waited for; the middle one is that of the preset `on_policy`."""
_RACES = (1.125, 1.25, 1.375, 1.5)
_AHEAD_WAVES = (1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 2.5)
_AHEAD_POOLS = (0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Ratios on the asynchronous pace, on which at least a batch is generated ahead anyway."""
_TOGETHER = 4
"""Groups of 8 rollouts: one pass for 32 rollouts costs a tenth of one pass for each rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Which kinds of schedules are possible.

    Attributes:
        may_defer: length buckets, which take back rollouts that they do not choose.
        tail: tail batching.
        paces: the paces that a schedule may name; with none it has the configured one.
        placement: the placement that schedules name.
    """

    may_defer: bool
    tail: bool = False
    paces: tuple[Pace, ...] = ()
    placement: Placement | None = None


def candidates(setting: Setting, space: Space) -> list[Schedule]:
    """All candidates. Pools refill every engine with a few groups at a time.

    Where the tokens of groups that would be too stale are thrown away, every candidate waits for
    all groups that it runs, or runs each of them to its end some time. On the asynchronous pace
    nothing can be deferred.
    """
    found: list[Schedule] = []
    for pace in space.paces or (None,):
        if (pace or setting.pace) == "asynchronous":
            refills = [] if setting.restarts else _ahead(setting)
        else:
            refills = _in_turn(setting, space)
        found += [
            Schedule(
                over_provision=ratio,
                refill=refill,
                pace=pace,
                placement=space.placement,
            )
            for ratio, refill in refills
        ]
    return found


def _in_turn(setting: Setting, space: Space) -> list[tuple[float, Refill]]:
    """Ratios and refill rules for the synchronous pace."""
    races: list[tuple[float, Refill]] = [(r, TailBatching()) for r in _RACES if space.tail]
    if setting.restarts:
        waited = _WAITED if space.may_defer else ()
        return [(1.0, Wave()), *((1.0, store) for store in waited), *races]
    together = _together(setting)
    refills: list[tuple[float, Refill]] = [(ratio, Wave()) for ratio in RATIOS]
    refills += [
        (ratio, Pool(together=together, until=until))
        for ratio in _POOL_RATIOS
        for until in _POOL_UNTIL
    ]
    if space.may_defer:
        refills += [(ratio, store) for ratio in _BUCKET_RATIOS for store in _STORES]
    return refills + races


def _ahead(setting: Setting) -> list[tuple[float, Refill]]:
    """Ratios and refill rules for the asynchronous pace."""
    pool = Pool(together=_together(setting))
    refills: list[tuple[float, Refill]] = [(ratio, Wave()) for ratio in _AHEAD_WAVES]
    return refills + [(ratio, pool) for ratio in _AHEAD_POOLS]


def _together(setting: Setting) -> int:
    engines = setting.fleet or setting.engines
    return min(_TOGETHER * engines, round(setting.batch_groups * setting.share))


_PLACED: dict[Placement, str] = {
    "prefix": "each group on one engine",
    "spread": "groups divided over the engines",
}


def in_words(schedule: Schedule) -> str:
    """Return the schedule in words."""
    pace = f", {schedule.pace} pace" if schedule.pace is not None else ""
    placed = "" if schedule.placement is None else f", {_PLACED[schedule.placement]}"
    return schedule.refill.describe(f"{schedule.over_provision:g}") + pace + placed
