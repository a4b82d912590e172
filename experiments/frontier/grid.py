"""Runs the main schedules on other workloads, with other spreads and means of the lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from aprilsched.config import SchedulerConfig
from aprilsched.presets import PRESETS
from aprilsched.workload import LongTailWorkload
from experiments.frontier.frontier import seeds_of
from experiments.frontier.results import write_section

__all__ = ["POLICIES"]

BATCHES, BURN_IN = 75, 15
_MEDIANS = {8192: 700.0, 16_384: 1000.0, 32_768: 1400.0}
"""Longer caps are set for longer answers: the median grows half as fast as the cap, so fewer
responses are cut off (in the logarithm)."""

POLICIES: dict[str, SchedulerConfig] = {
    **{name: PRESETS[name](SchedulerConfig()) for name in ("sync", "april", "copris")},
    "buckets": replace(SchedulerConfig(), refill="buckets", over_provision=1.69),
    "auto": PRESETS["auto"](SchedulerConfig()),
}


def workloads() -> list[LongTailWorkload]:
    """All of sigma and share at 8k, and the middle of them with other caps and laws."""
    middle = LongTailWorkload(median=_MEDIANS[8192], sigma=0.9, within_group=0.6, cap=8192)
    square = [
        replace(middle, sigma=sigma, within_group=share)
        for sigma in (0.7, 0.9, 1.1)
        for share in (0.3, 0.6, 0.9)
    ]
    long = [replace(middle, median=_MEDIANS[cap], cap=cap) for cap in (16_384, 32_768)]
    heavy = [replace(one, law="log_t") for one in (middle, *long)]
    return [*square, *long, *heavy]


def main() -> None:
    rows: list[dict[str, Any]] = []
    for workload in workloads():
        moments = workload.moments(1 << 17)
        known = {
            "law": workload.law,
            "sigma": workload.sigma,
            "within_group": workload.within_group,
            "cap": workload.cap,
            "median": workload.median,
            "mean": round(moments.mean),
            "cv2": round(moments.cv2, 3),
            "capped": round(moments.capped, 4),
        }
        for name, config in POLICIES.items():
            found = seeds_of(config, workload, batches=BATCHES, burn_in=BURN_IN)
            rows.append({**known, "policy": name} | found)
            print(*known.values(), name, found["efficiency"], found["off_policy"])
            write_section("grid", rows)


if __name__ == "__main__":
    main()
