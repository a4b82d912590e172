"""Makes result.json, the tables and the picture of README.md from raw/ and predictions.json.

    python experiments/h200/analysis.py

Intervals are from the 5th to the 95th percentile of 10,000 bootstrap samples of the counted
batches, drawn in blocks of four that follow each other, because a batch depends on the last one.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from predict import cells as all_cells  # noqa: E402
from schedules import MODEL, VARIANTS, Cell, figures  # noqa: E402

NAMES = {
    "waiting": "waiting", "waiting-streamed": "waiting, streamed", "april": "APRIL",
    "april-streamed": "APRIL, streamed", "areal": "AReaL", "areal-kept": "AReaL, KV kept",
    "auto": "auto, recompute", "auto-kept": "auto, KV kept",
    "auto-fast": "auto, speed alone", "auto-kept-fast": "auto, KV kept, speed alone",
    "auto-default": "auto, recompute, default", "auto-kept-default": "auto, KV kept, default",
}  # fmt: skip
BLOCK, SAMPLES = 4, 10_000
FEWEST = 8
"""A cell with fewer counted batches counts as missing."""
Rows = Sequence[dict[str, Any]]


def lines() -> list[dict[str, Any]]:
    """Everything that cells.py wrote."""
    return [json.loads(line) for line in (HERE / "raw" / "cells.jsonl").read_text().splitlines()]


def found() -> dict[str, dict[str, Any]]:
    """The longest run of each cell that has enough batches, by the cell's name."""
    best: dict[str, dict[str, Any]] = {}
    for line in lines():
        if line.get("kind") != "cell" or line["error"] not in ("", "the time ended"):
            continue
        kept = len(line["batches"]) - Cell.of(line["cell"]).burn_in
        if kept >= max(FEWEST, len(best.get(line["cell"], {"batches": ()})["batches"])):
            best[line["cell"]] = line
    return best


def drawn(count: int) -> NDArray[np.int64]:
    """Indices of bootstrap samples, int64 [SAMPLES, count], in blocks that wrap around."""
    random = np.random.default_rng(0)
    starts = random.integers(count, size=(SAMPLES, -(-count // BLOCK)))
    return ((starts[:, :, None] + np.arange(BLOCK)) % count).reshape(SAMPLES, -1)[:, :count]


def interval(rows: Rows, of: Callable[[NDArray[np.int64]], NDArray[np.float64]]) -> list[float]:
    low, high = np.quantile(of(drawn(len(rows))), [0.05, 0.95])
    return [float(low), float(high)]


def seconds(rows: Rows) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    values = np.array([row["step_s"] for row in rows])
    return lambda index: values[index].mean(1)


def efficiency(rows: Rows) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
    bounds = np.array([row["bound_s"] for row in rows])
    values = np.array([row["step_s"] for row in rows])
    return lambda index: bounds[index].sum(1) / values[index].sum(1)


def forecast(line: dict[str, Any], burn_in: int) -> dict[str, float] | None:
    """The planner's own forecasts that were in force, as means over the counted batches."""
    told: list[dict[str, Any]] = []
    for batch in range(burn_in, len(line["batches"])):
        before = [each["forecast"] for each in line["chosen"] if each["batch"] <= batch]
        if before and before[-1]:
            told.append(before[-1])
    if not told:
        return None
    return {
        name: float(np.mean([each[name] for each in told]))
        for name in ("step_seconds", "efficiency", "off_policy_share")
        if all(each.get(name) is not None for each in told)
    }


def table(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The figures of each measured cell, beside what was expected of it."""
    expected = {row["cell"]: row for row in json.loads((HERE / "predictions.json").read_text())}
    result = []
    for name, line in runs.items():
        cell = Cell.of(name)
        rows = line["batches"][cell.burn_in :]
        row = {"cell": name, "counted": len(rows), "code": line.get("code"), **figures(rows)}
        row["step_interval"] = interval(rows, seconds(rows))
        row["efficiency_interval"] = interval(rows, efficiency(rows))
        row["schedule"] = line["chosen"][-1]["schedule"] if line["chosen"] else ""
        if name in expected:
            row["predicted_step_s"] = expected[name]["step_s"]
            row["predicted_efficiency"] = expected[name]["efficiency"]
            row["predicted_off_policy"] = expected[name]["off_policy"]
        if (told := forecast(line, cell.burn_in)) is not None:
            row["forecast"] = told
        result.append(row)
    return result


def model_errors() -> dict[str, Any]:
    """Seconds of decode windows in the servers' logs, against the model's."""
    pattern = re.compile(r"#running-req: (\d+).*#(?:full )?token: (\d+).*throughput \(token/s\): "
                         r"([\d.]+)")  # fmt: skip
    ratios: list[tuple[int, float]] = []
    for path in sorted((HERE / "raw").glob("steps-*.txt.gz")):
        with gzip.open(path, "rt") as file:
            for line in file:
                if "Decode batch" in line and (match := pattern.search(line)):
                    running, tokens, rate = int(match[1]), int(match[2]), float(match[3])
                    if running and rate:
                        ratios.append((running, MODEL.step_seconds(running, tokens) * rate
                                       / running))  # fmt: skip
    result = {}
    for low, high in ((1, 8), (9, 64), (65, 256), (257, 512)):
        own = [ratio for running, ratio in ratios if low <= running <= high]
        if own:
            result[f"{low} to {high}"] = {
                "windows": len(own), "median": float(np.median(own)),
                "quartiles": [float(x) for x in np.quantile(own, [0.25, 0.75])],
            }  # fmt: skip
    return result


def result() -> dict[str, Any]:
    """Everything that README.md says."""
    runs = found()
    everything = {
        "cells": table(runs), "missing": [name for name in all_cells() if name not in runs],
        "windows_predicted_over_measured": model_errors(),
    }  # fmt: skip
    return json.loads(json.dumps(everything), parse_float=lambda text: float(f"{float(text):.4g}"))


def markdown(everything: dict[str, Any]) -> str:
    """The table of README.md."""
    head = ["cell", "batches", "step, s", "expected", "T_bound / T", "expected", "tokens/s",
            "off-policy", "age, oldest", "mean length", "the planner's own forecast"]  # fmt: skip
    text = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    order = {name: place for place, name in enumerate(all_cells())}
    for row in sorted(everything["cells"], key=lambda row: order.get(row["cell"], 999)):
        cell = Cell.of(row["cell"])
        low, high = row["step_interval"]
        least, most = row["efficiency_interval"]
        told = row.get("forecast", {})
        said = f"{told['step_seconds']:.2f} s, {told['efficiency']:.2f}" if told else ""
        title = f"{NAMES[cell.schedule]}, trainer {cell.train_seconds:g} s"
        title += ", full size" if cell.scale == 1 else ""
        title += f", {VARIANTS[cell.variant]}" if cell.variant else ""
        text.append(
            f"| {title} | {row['counted']} | {row['step_s']:.2f} ({low:.2f} to {high:.2f}) "
            f"| {row.get('predicted_step_s', float('nan')):.2f} "
            f"| {row['efficiency']:.2f} ({least:.2f} to {most:.2f}) "
            f"| {row.get('predicted_efficiency', float('nan')):.2f} | {row['tokens_s']:,.0f} "
            f"| {row['off_policy']:.2f} | {row['age']:.1f}, {row['oldest']} "
            f"| {row['mean_length']:.0f} | {said} |"
        )
    return "\n".join(text)


def picture(everything: dict[str, Any], path: Path) -> None:
    """Seconds of a step of each cell with its interval, and what was expected."""
    import matplotlib.pyplot as plt

    rows = {row["cell"]: row for row in everything["cells"]}
    parts = [(scale, trainer) for scale in ("0.25", "1") for trainer in ("0", "5", "20")
             if sum(f"{name}:{trainer}:{scale}" in rows for name in NAMES) > 1]  # fmt: skip
    figure, axes = plt.subplots(1, len(parts), figsize=(4 * len(parts), 3.8), squeeze=False,
                                layout="constrained")  # fmt: skip
    for axis, (scale, trainer) in zip(axes[0], parts, strict=True):
        own = [(title, rows[f"{name}:{trainer}:{scale}"]) for name, title in NAMES.items()
               if f"{name}:{trainer}:{scale}" in rows]  # fmt: skip
        for place, (title, row) in enumerate(reversed(own)):
            low, high = row["step_interval"]
            colour = "#00798c" if title.startswith("auto") else "#8d99ae"
            axis.barh(place, row["step_s"], color=colour, height=0.6,
                      xerr=[[row["step_s"] - low], [high - row["step_s"]]], capsize=3)  # fmt: skip
            axis.plot(row.get("predicted_step_s"), place, "D", color="#d1495b", markersize=5,
                      label="expected" if place == 0 else None)  # fmt: skip
        axis.set_yticks(range(len(own)), [title for title, _ in reversed(own)])
        size = "full size" if scale == "1" else "a quarter"
        axis.set(
            xlabel="seconds of a step", title=f"trainer of {trainer} s, {size}", xlim=(0, None)
        )
        axis.title.set_fontsize(10)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    everything = result()
    (HERE / "result.json").write_text(json.dumps(everything, indent=1) + "\n")
    print(markdown(everything))
    print("missing:", ", ".join(everything["missing"]))
    print(json.dumps(everything["windows_predicted_over_measured"], indent=1))
    picture(everything, HERE / "h200.png")


if __name__ == "__main__":
    main()
