"""Draws whole steps: efficiency against the off-policy share, for each fleet and trainer."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure, save
from experiments.frontier.results import HERE

__all__ = ["main"]

_BLUE, _ORANGE, _GREEN, _PINK, _YELLOW, _RED, _ = PALETTE
_ON_POLICY = {
    "waiting": "waiting",
    "waiting, streamed": "waiting, streamed",
    "rollpacker": "rollpacker",
    "rollpacker, streamed": "rollpacker, streamed",
    "on_policy": "on_policy",
    "on_policy, streamed": "on_policy, streamed",
    "on_policy, second epoch": "on_policy, second epoch",
}
"""Labels of the schedules without stale tokens, which stand in one column."""
_LABELS = {
    "april": "APRIL",
    "april, streamed": "APRIL, streamed",
    "areal": "AReaL",
    "buckets": "buckets",
    "auto": "auto",
    "auto, KV kept": "auto, KV kept",
    "auto, rolling": "auto, rolling",
    "rolling 2": "rolling, 2 batches",
}
"""Labels of the others, which stand left of their points."""
_APART = 0.038
"""Least distance of two labels above each other."""
_WIDTH = 0.0135
"""Of a letter."""


def main(path: Path = HERE / "steps.json") -> None:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    fleets = sorted({row["engines"] for row in rows})
    trainers = sorted({row["train_s"] for row in rows})
    figure = new_figure(6.2 * len(fleets), 5.0 * len(trainers))
    panels = figure.subplots(len(trainers), len(fleets), sharex=True, sharey=True, squeeze=False)
    for line, train_s in zip(panels, trainers, strict=True):
        for axes, engines in zip(line, fleets, strict=True):
            here = [r for r in rows if (r["engines"], r["train_s"]) == (engines, train_s)]
            _panel(axes, here)
            fleet = "one engine" if engines == 1 else f"{engines} engines"
            trainer = f"a trainer of {train_s:g} s" if train_s else "a trainer that takes no time"
            finish(
                axes,
                title=f"{fleet}, {trainer}",
                x="off-policy share of the delivered tokens (better: left)",
                y="least possible step / step (better: up)",
            )
    panels[0][0].set(xlim=(-0.04, 1.06), ylim=(0.0, 1.04))
    save(figure, HERE / "steps.png")


def _panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    # Without a trainer's time a stream is the same run.
    rows = [row for row in rows if row["train_s"] or "streamed" not in row["schedule"]]
    at = -1.0
    for row in sorted(rows, key=_efficiency):
        mean, name = row["mean"], row["schedule"]
        efficiency = _efficiency(row)
        colour = _colour(name)
        axes.plot(
            mean["off_policy"],
            efficiency,
            "s" if row["kv"] == "kept" else "o",
            color=colour,
            markersize=7,
            alpha=0.9,
        )
        if name in _ON_POLICY:
            at = max(at + _APART, efficiency)
            axes.annotate(_ON_POLICY[name], (0.025, at), va="center", fontsize=8.5, color=colour)
    placed: list[tuple[float, float, float]] = []
    for row in sorted(rows, key=_efficiency, reverse=True):
        label = _LABELS.get(row["schedule"])
        if label is None:
            continue
        right, at = row["mean"]["off_policy"] - 0.02, _efficiency(row)
        left = right - _WIDTH * len(label)
        for begin, end, height in placed:
            if begin < right and left < end:
                at = min(at, height - _APART)
        placed.append((left, right, at))
        colour = _colour(row["schedule"])
        axes.annotate(label, (right, at), ha="right", va="center", fontsize=8.5, color=colour)
    # Left of its point are the names of the schedules without stale tokens.
    kept = next(row for row in rows if row["schedule"] == "tail, tokens kept")
    below = (kept["mean"]["off_policy"] + 0.02, _efficiency(kept) - 0.02)
    axes.annotate("tail batching, tokens kept", below, va="center", fontsize=8.5, color=_ORANGE)
    axes.grid(color=GREY, alpha=0.2)


def _efficiency(row: dict[str, Any]) -> float:
    """The least time that a step can take, by its engines or its trainer, over what it takes."""
    return max(row["mean"]["bound_s"], row["train_s"]) / row["mean"]["step_s"]


def _colour(name: str) -> str:
    if "KV kept" in name:
        return _PINK
    if "streamed" in name:
        return _GREEN
    if name.startswith("auto"):
        return _RED
    if name.startswith("rolling"):
        return _YELLOW
    if name.startswith(("waiting", "rollpacker", "on_policy")):
        return _BLUE
    return _ORANGE


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
