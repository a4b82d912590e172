"""Compares automatic over-provisioning with the best fixed ratio of a grid.

    python experiments/auto_regret/benchmark.py --out experiments/auto_regret/result.json

Cells that are in the file already are not run again, so a run can be stopped and continued. See
README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from cell import BATCH_GROUPS, Drift, Figures, prompts_of, simulate

from aprilsched.config import RefillRule, SchedulerConfig
from aprilsched.planning.planner import RATIOS
from aprilsched.workload import LongTailWorkload

BATCHES = 60
BURN_IN = 15
"""Batches that the store of open groups of length buckets takes to fill and mix."""
DRIFTS = (
    Drift(name="median doubles", begin=10, end=50, factor=2.0),
    Drift(name="median jumps by 1.6", begin=30, end=31, factor=1.6),
    Drift(name="sigma 0.7 to 1.1", begin=10, end=50, sigma=1.1),
)
_GRID = (
    *((0.9, 0.6), (0.7, 0.3), (1.1, 0.9), (1.1, 0.3), (0.7, 0.9)),
    *((0.9, 0.3), (0.9, 0.9), (0.7, 0.6), (1.1, 0.6)),
)
"""Sigma and the share of the log-variance within a group: the corners before the edges."""
_STORE = 8
"""Batches of prompts that may be open beyond those delivered, and then some."""


def cells() -> Iterator[tuple[LongTailWorkload, Drift, str]]:
    """Workload, drift, and what becomes of the KV; the drifts first."""
    centre = LongTailWorkload(sigma=0.9, within_group=0.6)
    for kv in ("recompute", "keep"):
        for drift in DRIFTS:
            yield replace(centre, sigma=0.7 if drift.sigma else 0.9), drift, kv
    for sigma, share in _GRID:
        yield replace(centre, sigma=sigma, within_group=share), Drift(), "recompute"
    for sigma in (0.9, 0.7, 1.1):
        yield replace(centre, sigma=sigma), Drift(), "keep"


def measure(base: LongTailWorkload, drift: Drift, kv: str) -> dict[str, Any]:
    """One cell: auto, and every ratio as waves and as length buckets, or with KV kept as pools."""
    prompts = list(islice(prompts_of(base, drift), (BATCHES + _STORE) * BATCH_GROUPS * 2))
    common = SchedulerConfig(
        batch_groups=BATCH_GROUPS, straggler="retract" if kv == "recompute" else "in_place"
    )

    def run(config: SchedulerConfig) -> Figures:
        return simulate(config, iter(prompts), batches=BATCHES, burn_in=BURN_IN)

    row: dict[str, Any] = {
        "sigma": base.sigma,
        "share": base.within_group,
        "drift": drift.name,
        "kv": kv,
        "seed": base.seed,
        "auto": asdict(run(replace(common, over_provision="auto"))),
        "wave": {ratio: asdict(run(replace(common, over_provision=ratio))) for ratio in RATIOS},
    }
    refill: RefillRule = "buckets" if kv == "recompute" else "pool"
    other = replace(common, refill=refill)
    name = "rounds" if refill == "buckets" else refill
    row[name] = {ratio: asdict(run(replace(other, over_provision=ratio))) for ratio in RATIOS}
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = json.loads(options.out.read_text())["cells"]
    done = {tuple(row[name] for name in ("sigma", "share", "drift", "kv", "seed")) for row in rows}
    for seed in options.seeds:
        for base, drift, kv in cells():
            if (base.sigma, base.within_group, drift.name, kv, seed) in done:
                continue
            rows.append(measure(replace(base, seed=seed), drift, kv))
            text = json.dumps({"batches": BATCHES, "burn_in": BURN_IN, "cells": rows}, indent=1)
            options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
