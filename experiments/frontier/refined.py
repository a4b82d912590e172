"""Measures some schedules of the frontier with the refined step times.

    python -m experiments.frontier.refined

Efficiency is T_bound / T of what was delivered, since the refined model's decode time has parts
that T_bound does not count. See README.md in this folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aprilsched.timing.model import H200_QWEN3_4B
from aprilsched.workload import LongTailWorkload
from experiments.frontier.frontier import BATCHES, BURN_IN, SEEDS, workload_of
from experiments.frontier.measured import mean, run
from experiments.frontier.results import rounded
from experiments.frontier.schedules import keeping_kv, recomputing

_RATIOS = {
    "waves": (1.125, 1.25, 3.0),
    "pool": (1.5, 2.0),
    "taper": (1.25,),
    "rounds": (1.5, 1.69, 2.0),
}
_OUT = Path(__file__).with_name("refined.json")


def main() -> None:
    rows: list[dict[str, Any]] = []
    for kind, candidates in (("recompute", recomputing()), ("kv_kept", keeping_kv())):
        for candidate in candidates:
            wanted = _RATIOS.get(candidate.family)
            if wanted is not None and candidate.ratio not in wanted:
                continue
            several = [
                run(
                    candidate.config,
                    workload_of(LongTailWorkload(), seed),
                    batches=BATCHES,
                    model=H200_QWEN3_4B,
                ).figures(BURN_IN)
                for seed in range(SEEDS)
            ]
            found = rounded(mean(several))
            rows.append({"kind": kind, "name": candidate.name, **found})
            speed, stale = found["efficiency_delivered"], found["off_policy"]
            print(f"{kind:10} {candidate.name:13} {speed:.3f} {stale:.3f}", flush=True)
            _OUT.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
