"""The schedules of the frontier, each with its family; a family is drawn as one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from aprilsched.config import LengthBuckets, Pool, SchedulerConfig
from aprilsched.planning.presets import PRESETS

__all__ = ["Candidate", "keeping_kv", "recomputing"]

_PRESETS = ("sync", "april", "slime", "areal", "copris", "pool", "auto")
_WAVES = (1.0625, 1.125, 1.25, 1.75, 2.5, 3.0)
_BUCKETS = (1.125, 1.25, 1.375, 1.5, 1.5938, 1.69, 1.875, 2.0)
_POOLS = (1.25, 1.5, 2.0)


class Candidate(NamedTuple):
    """A schedule by name; `family` is waves, pool, taper, buckets or preset, `ratio` its place."""

    name: str
    family: str
    ratio: float
    config: SchedulerConfig


def recomputing() -> list[Candidate]:
    """What is in flight at a refit is prefilled again."""
    base = SchedulerConfig()
    return [*_common(base, _POOLS), *_buckets(base)]


def keeping_kv() -> list[Candidate]:
    """The KV of what is in flight stays as older weights computed it."""
    return list(_common(SchedulerConfig(straggler="in_place"), _POOLS))


def _common(base: SchedulerConfig, pools: Iterable[float]) -> Iterator[Candidate]:
    for name in _PRESETS:
        config = PRESETS[name](base)
        ratio = config.over_provision
        yield Candidate(name, "preset", ratio if isinstance(ratio, float) else 0.0, config)
    yield from _along("waves", _WAVES, lambda x: replace(base, over_provision=x, refill="wave"))
    yield from _along("pool", pools, lambda x: replace(base, over_provision=x, refill="pool"))
    yield from _along(
        "taper",
        (1.0, 1.25),
        lambda x: replace(base, over_provision=x, refill=Pool(until=0.25)),
    )


def _buckets(base: SchedulerConfig) -> Iterator[Candidate]:
    buckets = replace(base, refill=LengthBuckets(store=5, probes=1, oldest=16))
    yield from _along("buckets", _BUCKETS, lambda x: replace(buckets, over_provision=x))


def _along(
    family: str, ratios: Iterable[float], config: Callable[[float], SchedulerConfig]
) -> Iterator[Candidate]:
    for ratio in ratios:
        yield Candidate(f"{family} {ratio:g}", family, ratio, config(ratio))
