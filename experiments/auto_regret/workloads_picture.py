"""Draws the step times of all policies on all workloads, and makes the tables of README.md.

python experiments/auto_regret/workloads_picture.py experiments/auto_regret/workloads.json \
    experiments/auto_regret/workloads_seed8.json
python experiments/auto_regret/workloads_picture.py experiments/auto_regret/drawn.json

A second file has the same workloads with other lengths.
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure, save

AUTO, TAIL = "auto", "auto, tail"
BIASED = "rollpacker"
"""Its delivered lengths are too short for good, so auto does likewise only where it may."""
TOO_STALE = 0.005
"""The share of tokens beyond the bound on staleness that auto allows."""
Runs = dict[str, dict[str, Any]]


def presets(runs: Runs) -> Runs:
    """The presets with which auto is compared: those that keep the bound and draw every length."""
    bounded = {name: row for name, row in runs.items() if row["bound"] is not None}
    late = {name for name, row in bounded.items() if row.get("masked", 0.0) > TOO_STALE}
    left_out = late | {BIASED}
    return {
        name: row
        for name, row in runs.items()
        if not name.startswith("auto") and name not in left_out
    }


def best(runs: Runs, by: str, sign: int) -> str:
    """The preset with the largest `by`, or with sign -1 the smallest."""
    return max(presets(runs), key=lambda name: sign * runs[name][by])


def slower(runs: Runs, name: str) -> float:
    """By how many percent its steps are longer than those of the fastest preset."""
    return 100 * (runs[name]["step_s"] / runs[best(runs, "step_s", -1)]["step_s"] - 1)


def better(runs: Runs) -> float:
    """By how many percent auto's objective is above that of the best preset."""
    return 100 * (runs[AUTO]["value"] / runs[best(runs, "value", 1)]["value"] - 1)


def _law(name: str) -> str:
    """The name of a workload without what follows its law."""
    depth, end = 0, len(name)
    for place, letter in enumerate(name):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth and ":" in name:
            end = place
            break
    return name[:end]


def stale(row: dict[str, Any]) -> str:
    return f"{row['off_policy']:.2f}, {row['age_mean']:.1f}"


def table(rows: dict[str, Runs], again: dict[str, Runs]) -> str:
    lines = [
        "| workload | fastest preset | its step, s | auto: step | objective | off-policy, age |"
        + (" step with other lengths |" if again else ""),
        "|---|---|---|---|---|---|" + ("---|" if again else ""),
    ]
    for name, runs in rows.items():
        fastest = best(runs, "step_s", -1)
        other = runs[fastest]
        line = (
            f"| {name} | {fastest} ({stale(other)}) | {other['step_s']:.1f} "
            f"| {slower(runs, AUTO):+.1f} % | {better(runs):+.1f} % | {stale(runs[AUTO])} |"
        )
        lines.append(line + (f" {slower(again[name], AUTO):+.1f} % |" if again else ""))
    return "\n".join(lines)


def without_stale_tokens(rows: dict[str, Runs]) -> str:
    """auto against waiting, and with tail batching allowed against rollpacker."""
    lines = [
        "| workload | waiting, s | on_policy | auto | rollpacker | auto with tail batching |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in rows.items():
        if runs["sync"]["bound"] != 0:
            continue
        waits = runs["sync"]["step_s"]
        cells = [
            f"{100 * (runs[each]['step_s'] / waits - 1):+.1f} %" if each in runs else "none"
            for each in ("on_policy", AUTO, BIASED, TAIL)
        ]
        lines.append(f"| {name} | {waits:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def told(rows: dict[str, Runs]) -> str:
    found = [slower(runs, AUTO) for runs in rows.values()]
    return (
        f"{len(found)} workloads: {sum(x <= 2 for x in found)} within 2 %, worst "
        f"{max(found):+.1f} %, faster than all presets on {sum(x < -0.05 for x in found)} and as "
        f"fast on {sum(abs(x) <= 0.05 for x in found)}, mean {sum(found) / len(found):+.1f} %; "
        f"objective mean {sum(map(better, rows.values())) / len(found):+.1f} %, worst "
        f"{min(map(better, rows.values())):+.1f} %; mean age "
        f"{sum(runs[AUTO]['age_mean'] for runs in rows.values()) / len(found):.2f}, off-policy "
        f"{sum(runs[AUTO]['off_policy'] for runs in rows.values()) / len(found):.3f}"
    )


def draw(rows: dict[str, Runs], again: dict[str, Runs], path: Path) -> None:
    shown = list(reversed(rows.items()))
    figure = new_figure(9, 0.27 * len(rows) + 1.6)
    axes = figure.add_subplot()
    for place, (_, runs) in enumerate(shown):
        others = [slower(runs, name) for name in presets(runs)]
        near = [value for value in others if value <= 60]
        axes.plot(near, [place] * len(near), "|", color=GREY, markersize=8)
    series = [(rows, PALETTE[0], "o", "auto"), (again, PALETTE[1], "D", "auto, other lengths")]
    for several, colour, marker, label in series:
        if several:
            axes.plot(
                [slower(several[name], AUTO) for name, _ in shown],
                range(len(shown)),
                marker,
                color=colour,
                markersize=5,
                label=label,
            )
    axes.plot([], [], "|", color=GREY, label="presets")
    axes.set_yticks(range(len(shown)), [_law(name) for name, _ in shown], fontsize=8)
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
    source, *others = map(Path, sys.argv[1:])
    rows: dict[str, Runs] = json.loads(source.read_text(encoding="utf-8"))
    again: dict[str, Runs] = {}
    if others:
        again = json.loads(others[0].read_text(encoding="utf-8"))
        print(told(again))
    print(told(rows))
    print(table(rows, again))
    if any(runs["sync"]["bound"] == 0 for runs in rows.values() if "sync" in runs):
        print(without_stale_tokens(rows))
    draw(rows, again, source.with_suffix(".png"))


if __name__ == "__main__":
    main()
