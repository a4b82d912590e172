"""Draws the step times of all policies on all workloads, and makes the table of README.md.

python experiments/auto_regret/workloads_picture.py experiments/auto_regret/workloads.json
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from aprilsched.analysis.style import PALETTE, finish, new_figure, save

AUTO, ALONE = "auto", "auto, speed alone"
Runs = dict[str, dict[str, Any]]


def best(runs: Runs, by: str, sign: int) -> str:
    """The preset with the largest `by`, or with sign -1 the smallest."""
    presets = [name for name in runs if not name.startswith("auto")]
    return max(presets, key=lambda name: sign * runs[name][by])


def slower(runs: Runs, name: str) -> float:
    """By how many percent its steps are longer than those of the fastest preset."""
    return 100 * (runs[name]["step_s"] / runs[best(runs, "step_s", -1)]["step_s"] - 1)


def better(runs: Runs, name: str) -> float:
    """By how many percent its objective is above that of the best preset."""
    return 100 * (runs[name]["value"] / runs[best(runs, "value", 1)]["value"] - 1)


def table(rows: dict[str, Runs]) -> str:
    lines = [
        "| workload | fastest preset | its step, s | auto: step | objective | off-policy, age "
        "| speed alone: step | off-policy, age |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in rows.items():
        fastest = best(runs, "step_s", -1)
        auto, alone, other = runs[AUTO], runs[ALONE], runs[fastest]
        lines.append(
            f"| {name} | {fastest} ({other['off_policy']:.2f}, {other['age_mean']:.1f}) "
            f"| {other['step_s']:.1f} | {slower(runs, AUTO):+.1f} % | {better(runs, AUTO):+.1f} % "
            f"| {auto['off_policy']:.2f}, {auto['age_mean']:.1f} | {slower(runs, ALONE):+.1f} % "
            f"| {alone['off_policy']:.2f}, {alone['age_mean']:.1f} |"
        )
    return "\n".join(lines)


def draw(rows: dict[str, Runs], path: Path) -> None:
    shown = list(reversed(rows.items()))
    figure = new_figure(9, 0.27 * len(rows) + 1.6)
    axes = figure.add_subplot()
    for place, (_, runs) in enumerate(shown):
        others = [slower(runs, name) for name in runs if not name.startswith("auto")]
        near = [value for value in others if value <= 60]
        axes.plot(near, [place] * len(near), "|", color="0.6", markersize=8)
    for name, colour, marker in ((AUTO, PALETTE[0], "o"), (ALONE, PALETTE[1], "D")):
        axes.plot(
            [slower(runs, name) for _, runs in shown],
            range(len(shown)),
            marker,
            color=colour,
            markersize=5,
            label=name,
        )
    axes.plot([], [], "|", color="0.6", label="presets")
    axes.set_yticks(range(len(shown)), [name for name, _ in shown], fontsize=8)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.axvline(2, color="black", linestyle="--", linewidth=1)
    axes.legend(loc="lower right", fontsize=8)
    finish(
        axes,
        title="Seconds of a whole step against the fastest preset",
        x="% longer than the fastest preset of that workload (dashed: the goal)",
        y="",
    )
    save(figure, path)


def main() -> None:
    source = Path(sys.argv[1])
    rows: dict[str, Runs] = json.loads(source.read_text(encoding="utf-8"))
    print(table(rows))
    draw(rows, source.with_suffix(".png"))


if __name__ == "__main__":
    main()
