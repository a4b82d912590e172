"""Writes down what the simulator expects of each cell, before any cell is measured.

    python experiments/h200/predict.py [CELL …]

Cells that are in predictions.json already are left as they are.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

from schedules import LISTS, Cell, figures, fleets, simulated

HERE = Path(__file__).resolve().parent
FILE = HERE / "predictions.json"


def main() -> None:
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                         check=True, cwd=HERE)  # fmt: skip
    for name in sys.argv[1:] or chain(*LISTS, *fleets(2)):
        cell = Cell.of(name)
        if name in known or cell.arm.endswith(("weights", "killed")):
            continue
        row = figures(simulated(cell)[cell.burn_in :])
        known[name] = {key: round(value, 4) for key, value in row.items()}
        known[name]["code"] = git.stdout.strip()
        FILE.write_text(json.dumps(known, indent=1) + "\n")
        speed, staleness = row["generated_s"], row["staleness"]
        print(f"{name}: {speed:,.0f} tokens/s, staleness {staleness:.2f}", flush=True)


if __name__ == "__main__":
    main()
