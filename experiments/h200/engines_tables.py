"""Makes engines.json and the tables of engines.md from what engines.py and trainer.py measured.

    python experiments/h200/engines_tables.py [FOLDER …]

A folder has the files of run.sh. Their cells and arms come to those of engines.json, in the place
of those of the same name on as many GPUs. Without a folder the tables are made again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from analysis import fitted, interval, rounded, written
from schedules import ARMS, BURN_IN, Cell, figures, simulated

from aprilsched.planning.step_times.model import StepTimeModel
from experiments.library import table

HERE = Path(__file__).resolve().parent
FILE = HERE / "engines.json"
PARTS = ("step_s", "waits_s", "pause_s", "refit_s", "trains_s")


def merged(folders: list[str]) -> dict[str, dict[str, Any]]:
    """Return the lines of engines.json and of the folders, by their names."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {"cells": {}, "arms": {}}
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.jsonl"))):
        log = path.name.replace("engines", "steps").replace(".jsonl", "-server-0-0.txt.gz")
        own = fitted(path.with_name(log))
        for line in map(json.loads, path.read_text().splitlines()):
            if "updates" in line:
                line["updates"] = aligned(line["updates"])
                found["arms"][line["arm"]] = line
            elif "cell" in line and len(line["batches"]) >= Cell.of(line["cell"]).burn_in + 2:
                gpus = len(set(line["places"]))
                found["cells"][f"{gpus} {line['cell']}"] = line | since(line, gpus, own)
    return rounded(found)


def since(line: dict[str, Any], gpus: int, own: dict[str, Any]) -> dict[str, Any]:
    """Return what the simulator expects with the step times of an engine's log."""
    cell = Cell.of(line["cell"])
    if "model" not in own or gpus < cell.engines or line["events"]:
        return {}
    rows = simulated(cell, StepTimeModel(**own["model"]), len(line["batches"]))
    return {"since": figures(rows[cell.burn_in :])["generated_s"]}


def aligned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each row the seconds and the tokens of its own step.

    The trainer writes a row when its update ends and before the listener counts that step, so the
    next row has its tokens.
    """
    return [
        row | {
            "step_s": row["seconds"] - (rows[place - 1]["seconds"] if place else 0.0),
            "generated": rows[place + 1]["generated"],
        }
        for place, row in enumerate(rows[:-1])
    ]  # fmt: skip


def cells_table(cells: dict[str, Any], predicted: dict[str, Any]) -> str:
    """The table of cells. The share of linear scaling is that of the arm on one GPU's engines."""
    rates = {}
    for key, line in cells.items():
        rates[key] = figures(line["batches"][Cell.of(line["cell"]).burn_in :])
    lines = []
    for key, line in cells.items():
        cell, row, gpus = Cell.of(line["cell"]), rates[key], int(key.split()[0])
        each = cell.engines // gpus
        alone = f"1 {each}x{16 * each}:{cell.arm}:s{cell.seed}"
        shares = ["", ""]
        if gpus > 1 and alone in rates:
            shares[0] = f"{row['generated_s'] / rates[alone]['generated_s'] / gpus:.2f}"
            if "since" in line:
                shares[1] = f"{line['since'] / cells[alone]['since'] / gpus:.2f}"
        generated = sum(batch["generated"] for batch in line["batches"])
        low, high = interval(line["batches"][cell.burn_in :])
        expected = predicted.get(cell.name) if each == 2 else None
        lines.append([
            ARMS[cell.arm].title, gpus, cell.engines, cell.groups, row["batches"],
            f"{row['generated_s']:,.0f} ({low:,.0f} to {high:,.0f})",
            f"{expected['generated_s']:,.0f}" if expected else "",
            f"{line['since']:,.0f}" if "since" in line else "", *shares,
            f"{row['staleness']:.2f}", f"{row['off_policy']:.2f}",
            f"{line['cpu_s'] / generated * 1e6:.1f}", f"{line['cpu_s'] / line['seconds']:.2f}",
        ])  # fmt: skip
    head = ["arm", "GPUs", "engines", "groups", "batches", "generated tokens/s", "predicted",
            "simulated since", "of linear", "simulated", "mean staleness", "off-policy",
            "CPU, µs a token", "cores"]  # fmt: skip
    return table(head, lines)


def events(cells: dict[str, Any]) -> str:
    """What became of engines and groups, and what must not happen."""
    found = [
        f"{Cell.of(line['cell']).title}, {key.split()[0]} GPUs: "
        + ", ".join(f"{event} after {at:.1f} s" for at, event in line["events"] if at)
        for key, line in cells.items() if any(at for at, _ in line["events"])
    ]  # fmt: skip
    wrong = {name: line["wrong"] for name, line in cells.items() if any(line["wrong"].values())}
    return (
        f"Engines that were lost and came back, and dropped groups: {'; '.join(found) or 'none'}."
        f"\n\nResponses that ended otherwise or were delivered twice: {wrong or 'none'}."
    )


def arms_table(arms: dict[str, Any]) -> str:
    """The table of the trainer's arms: means over the counted updates."""
    lines = []
    for name, line in arms.items():
        skipped = max(BURN_IN, Cell.of(f"1x1:{name}:s0").burn_in)
        rows = line["updates"][min(skipped, len(line["updates"]) - 2) :]
        means = [sum(row[part] for row in rows) / len(rows) for part in PARTS]
        rate = figures(rows)
        lines.append([
            ARMS[name].title, len(rows), *(f"{mean:.3f}" for mean in means),
            f"{means[0] - sum(means[1:]):.3f}", f"{rate['generated_s']:,.0f}",
            f"{rate['staleness']:.2f}", f"{rate['off_policy']:.2f}",
        ])  # fmt: skip
    head = ["arm", "updates", "step, s", "generation wait", "pause", "refit", "training", "rest",
            "generated tokens/s", "mean staleness", "off-policy"]  # fmt: skip
    return table(head, lines)


def markdown(found: dict[str, Any]) -> str:
    predicted = json.loads((HERE / "predictions.json").read_text())
    cells = found["cells"]
    return "\n\n".join((cells_table(cells, predicted), events(cells), arms_table(found["arms"])))


def main() -> None:
    found = merged(sys.argv[1:])
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(markdown(found))
    written(markdown(found), HERE / "engines.md")


if __name__ == "__main__":
    main()
