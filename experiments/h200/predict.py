"""Writes down what the simulator expects of each cell, before any cell is measured.

    python experiments/h200/predict.py [CELL …]

Cells that are in predictions.json already are left as they are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from schedules import PACED, SCHEDULES, Cell, simulated

HERE = Path(__file__).resolve().parent
FILE = HERE / "predictions.json"


def cells() -> list[str]:
    """Every cell of the experiment."""
    names = [f"{schedule}:{trainer}:{scale}" for scale in ("0.25", "1") for trainer in (0, 5, 20)
             for schedule in SCHEDULES if trainer or not schedule.endswith("streamed")]  # fmt: skip
    several = ("waiting", "april", "auto-default", "auto-kept-default")
    others = [f"{name}:0:0.25:{variant}" for variant in ("tail", "two") for name in several]
    alike = ("waiting", "april", "april-kept", "areal-kept", "auto-default", "auto-kept-default")
    experts = [f"{name}:0:1:moe" for name in alike]
    again = [f"{name}:0:1:{more}s1" for more in ("moe:", "") for name in alike
             if name in ("april-kept", "auto-kept-default")]  # fmt: skip
    return [*names, "april:0:0.25:moved", *others, *experts, *again]


def main() -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else []
    there = {row["cell"] for row in known}
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                         check=True, cwd=HERE)  # fmt: skip
    for name in sys.argv[1:] or cells():
        if name in there:
            continue
        row = simulated(Cell.of(name)) | {"code": git.stdout.strip(), "pace_chosen": PACED}
        row = {key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}
        known.append(row)
        FILE.write_text(json.dumps(known, indent=1) + "\n")
        print(f"{name}: {row['step_s']:.2f} s, {row['efficiency']:.3f} of the bound, off-policy "
              f"{row['off_policy']:.2f}, {row['seconds']:.0f} s in all", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
