"""Measures how long the first batches of auto take beside a trainer, against AReaL's recipe.

    python experiments/auto_regret/begin.py --out begin.json

See README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from workloads import Meter, Workload, policies, simulation_of, workloads

from aprilsched.config import SchedulerConfig
from aprilsched.simulation import rare_collections

NAMES = ("trainer of 5 s", "trainer of 20 s", "trainer of 60 s", "built-in", "bimodal by group")
SEEDS = (7, 8, 9)
BATCHES = 14


def begin(workload: Workload, config: SchedulerConfig) -> dict[str, float]:
    """Seconds of the first ten batches, and what the engines did of the bound in 10 and in 14."""
    meter = Meter(workload)
    simulation = simulation_of(workload, config, BATCHES + 1, [meter])
    with rare_collections():
        simulation.run()
    return {
        "seconds_10": round(meter.asked[10], 1),
        "of_bound_10": round(meter.generated[10] / meter.asked[10], 3),
        "of_bound_14": round(meter.generated[14] / meter.asked[14], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    several = {workload.name: workload for workload in workloads()}
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name in NAMES:
        for policy in ("auto", "areal"):
            found = rows.setdefault(name, {})[policy] = [
                begin(workload, dict(policies(workload))[policy])
                for workload in (replace(several[name], seed=seed) for seed in SEEDS)
            ]
            print(name, policy, found, file=sys.stderr, flush=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
