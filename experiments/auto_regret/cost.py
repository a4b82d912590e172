"""Measures what a choice of a schedule costs: seconds of CPU, and memory beside the library.

    python experiments/auto_regret/cost.py --out cost.json
    python experiments/auto_regret/cost.py --trees ../before . --out cost.json

With several trees of the source, each choice is made with all of them in turn, in processes of
their own. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from aprilsched import LongTailWorkload, SchedulerConfig
from aprilsched.core.lengths.observed import GroupLengths
from aprilsched.core.messages.commands import Plan
from aprilsched.core.policies.refill import Wave
from aprilsched.core.policies.schedule import Schedule
from aprilsched.planning import Planner

BATCHES = 9
"""Number of batches whose lengths are known: the third choice of a run."""
AUTO = SchedulerConfig(group_size=8, over_provision="auto", pace="auto")
SYNCHRONOUS = replace(AUTO, pace="synchronous")
ROLLING = replace(AUTO, refit="rolling", pace="asynchronous", straggler="run")
_DIVIDED: dict[str, Any] = {"places": True}
_BOTH: dict[str, Any] = _DIVIDED | {"paces": ("synchronous", "asynchronous"), "train_seconds": 20.0}

CELLS: dict[str, tuple[SchedulerConfig, int, int, dict[str, Any]]] = {
    "16 groups, 1 engine": (SYNCHRONOUS, 16, 1, {}),
    "16 groups, 1 engine, trainer": (AUTO, 16, 1, _BOTH),
    "128 groups, 1 engine, trainer": (AUTO, 128, 1, _BOTH),
    "64 groups, 4 engines": (SYNCHRONOUS, 64, 4, _DIVIDED),
    "64 groups, 4 engines, each group on one": (SYNCHRONOUS, 64, 4, {}),
    "64 groups, 16 engines, divided or not, long prompts": (
        SYNCHRONOUS,
        64,
        16,
        _DIVIDED | {"prompt_tokens": 4000.0},
    ),
    "1024 groups, 128 engines": (SYNCHRONOUS, 1024, 128, _DIVIDED),
    "1024 groups, 128 engines, each group on one": (SYNCHRONOUS, 1024, 128, {}),
    "1024 groups, 128 engines, trainer": (AUTO, 1024, 128, _BOTH),
    "64 groups, 16 engines, rolling": (ROLLING, 64, 16, {"train_seconds": 5.0}),
    "512 groups, 128 engines, rolling": (ROLLING, 512, 128, {"train_seconds": 5.0}),
    "16 groups, 1 engine, rewards": (AUTO, 16, 1, _BOTH | {"reward_seconds": (10.0, 20.0)}),
    "16 groups, 1 engine, three gaps": (
        AUTO,
        16,
        1,
        _BOTH | {"gaps": 3.0, "gap_seconds": (2.0, 5.0, 20.0)},
    ),
    "16 groups, 1 engine, staleness 0": (replace(SYNCHRONOUS, max_staleness=0), 16, 1, {}),
    "16 groups, 1 engine, staleness 0, tail": (
        replace(SYNCHRONOUS, max_staleness=0, refill="tail"),
        16,
        1,
        {},
    ),
    "64 groups, 1 engine, KV kept": (replace(AUTO, straggler="in_place"), 64, 1, _BOTH),
}
"""Configuration, groups of a batch, engines, and what else a plan has."""


def choice(name: str) -> dict[str, Any]:
    """Make one choice in this process."""
    config, groups, engines, known = CELLS[name]
    config = replace(config, batch_groups=groups)
    workload = LongTailWorkload(group_size=8, seed=7)
    ended = tuple(
        GroupLengths.whole(index, workload.lengths(index).tolist())
        for index in range(BATCHES * groups)
    )
    given: dict[str, Any] = {"prompt_tokens": 256.0, "kv_tokens": None} | known
    plan = Plan(
        batch_groups=groups,
        group_size=8,
        ended=ended,
        open=(),
        engines=engines,
        current=Schedule(over_provision=1.5, refill=Wave()),
        **given,
    )
    before, began = _peak_mb(), time.process_time()
    schedule = Planner().plan(plan, config)
    return {
        "cpu_s": round(time.process_time() - began, 2),
        "mb": round(_peak_mb() - before, 1),
        "chosen": schedule.why,
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path()])
    parser.add_argument("--only", default="", help="names of cells that contain this")
    parser.add_argument("--cell", help="make one choice here, and print its figures")
    options = parser.parse_args()
    if options.cell is not None:
        print(json.dumps(choice(options.cell)))
        return
    rows: dict[str, dict[str, Any]] = {}
    for name in (name for name in CELLS if options.only in name):
        for tree in options.trees:
            found = subprocess.run(
                [sys.executable, __file__, "--cell", name],
                env={**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                check=True,
            )
            figures = rows.setdefault(name, {})[tree.resolve().name] = json.loads(found.stdout)
            print(f"{name}, {tree.resolve().name}: {figures}", file=sys.stderr, flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
