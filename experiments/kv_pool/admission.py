"""Compares trials that know SGLang's rule of admission with trials by the earlier rule.

    python experiments/kv_pool/admission.py

Auto with KV kept on the shapes and step times of the seventh machine of experiments/h200, in its
full size, where the KV pool is full. Writes admission.json. See README.md in this folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "h200"))

from schedules import Cell, simulated  # noqa: E402

from aprilsched.planning.trial import DecodeBatch  # noqa: E402
from aprilsched.timing import StepTimeModel  # noqa: E402
from aprilsched.timing.model import RESERVE_SHARE  # noqa: E402

BATCHES = 40
SHAPES = {"moe:": "seventh machine, experts", "": "seventh machine, 4B"}


def tenth_for_all(batch: DecodeBatch, context: float, left: int) -> bool:
    """The earlier rule: a share of all tokens still to come, of the newcomer too."""
    if not batch.running:
        return True
    to_come = batch.sum_of_ends - len(batch.running) * batch.step + left
    return batch.kv + context + 1 + RESERVE_SHARE * to_come <= batch.pool


def run(cell: Cell, model: StepTimeModel) -> dict[str, Any]:
    found = simulated(cell, model, BATCHES)
    kept = {name: round(found[name], 3) for name in ("generated_s", "off_policy", "age")}
    return kept | {"schedule": found["schedule"]}


def main() -> None:
    models = json.loads((HERE.parent / "h200" / "raw" / "models.json").read_text())
    rows: list[dict[str, Any]] = []
    for shape, machine in SHAPES.items():
        model = StepTimeModel(**models[machine]["model"])
        for seed in range(1, 7):
            cell = Cell.of(f"auto-kept-default:0:1:{shape}s{seed}")
            now = run(cell, model)
            with patch.object(DecodeBatch, "fits", tenth_for_all):
                before = run(cell, model)
            rows.append({"machine": machine, "seed": seed, "now": now, "before": before})
            print(json.dumps(rows[-1]), flush=True)
    (HERE / "admission.json").write_text(json.dumps(rows, indent=1) + "\n")
    for machine in SHAPES.values():
        own = [row for row in rows if row["machine"] == machine]
        print(machine, {
            rule: [round(sum(row[rule][name] for row in own) / len(own), 2)
                   for name in ("generated_s", "off_policy", "age")]
            for rule in ("before", "now")
        })  # fmt: skip


if __name__ == "__main__":
    main()
