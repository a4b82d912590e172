"""Draws the frontier in two panels: with recompute on the left, with KV kept on the right."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from aprilsched.observe.report.style import GREY, PALETTE, finish, new_figure, save
from experiments.frontier.results import HERE, section

__all__ = ["main"]

_BLUE, _ORANGE, _GREEN, _PINK, _, _RED, _ = PALETTE
_COLOURS = {"waves": _ORANGE, "pool": _BLUE, "taper": _PINK, "buckets": _GREEN}
_MEMBERS = {"sync": "waves", "slime": "waves", "april": "waves", "pool": "pool"}
"""Presets that are points of a family's line."""
_NAMES = {
    "sync": "wait for all",
    "april": "APRIL",
    "slime": "slime",
    "areal": "AReaL",
    "copris": "CoPRIS",
    "auto": "auto",
}


def main() -> None:
    figure = new_figure(12.5, 5.6)
    left, right = figure.subplots(1, 2, sharey=True)
    recompute, kept = section("recompute"), section("kv_kept")
    april = next(row for row in recompute if row["name"] == "april")["efficiency"]
    _panel(left, recompute, _LEFT)
    _panel(right, kept, _RIGHT)
    _budget(left, 0.0, 0.65, april, "budget: at least APRIL's\nefficiency, at 0.65 or less", 0.02)
    _budget(right, 0.0, 1.0, 0.95, "budget: 0.95", 0.02)
    finish(
        left,
        title="Recompute: length buckets pass APRIL with fewer off-policy tokens",
        x="off-policy share of the delivered tokens  (better: left)",
        y="efficiency, T_bound / T  (better: up)",
    )
    finish(
        right,
        title="KV kept: the largest pool is nearest to the bound, and auto takes it",
        x="off-policy share of the delivered tokens",
        y="",
    )
    left.set(xlim=(-0.02, 1.0), ylim=(0.42, 1.0))
    right.set(xlim=(-0.02, 1.0))
    save(figure, HERE / "frontier.png")
    _ages(recompute)


def _ages(rows: list[dict[str, Any]]) -> None:
    """The same schedules by how many versions old a token is in the mean."""
    figure = new_figure(8, 5.2)
    axes = figure.subplots()
    _panel(axes, [r for r in rows if r["family"] != "taper"], _AGES, x="staleness")
    finish(
        axes,
        title="In versions, length buckets are staler than waves: what is deferred grows old",
        x="mean staleness of the delivered tokens, versions  (better: left)",
        y="efficiency, T_bound / T  (better: up)",
    )
    axes.set(xlim=(-0.1, 4.1), ylim=(0.44, 0.78))
    save(figure, HERE / "staleness.png")


_Places = dict[str, tuple[float, float, str]]
"""Where a point's or a line's label goes, in points from it, and how it is aligned."""

_LEFT: _Places = {
    "sync": (8, -3, "left"),
    "april": (6, -13, "left"),
    "slime": (8, -8, "left"),
    "areal": (12, 2, "left"),
    "copris": (-8, -6, "right"),
    "auto": (-8, 8, "right"),
    "waves 1.25": (10, -8, "left"),
    "buckets 1.25": (-10, 4, "right"),
    "pool 2": (-6, -16, "right"),
    "taper 1.25": (4, 8, "left"),
}
_RIGHT: _Places = {
    "sync": (8, -3, "left"),
    "april": (8, -8, "left"),
    "slime": (8, -8, "left"),
    "areal": (8, -12, "left"),
    "copris": (10, -8, "left"),
    "auto": (-10, 2, "right"),
    "waves 1.25": (10, -8, "left"),
    "pool 1.5": (-8, 8, "right"),
    "taper 1": (-8, 4, "right"),
}
_AGES: _Places = {
    "sync": (8, -3, "left"),
    "april": (-8, 8, "right"),
    "slime": (-10, 4, "right"),
    "areal": (-4, -15, "center"),
    "copris": (-8, -8, "right"),
    "auto": (4, -18, "left"),
    "waves 1.25": (-8, 4, "right"),
    "buckets 1.25": (10, -16, "left"),
    "pool 2": (-12, -4, "right"),
}
_LINES = {
    "waves": "waves",
    "buckets": "length buckets",
    "pool": "pools",
    "taper": "pools that taper",
}


def _panel(axes: Axes, rows: list[dict[str, Any]], places: _Places, x: str = "off_policy") -> None:
    for family, colour in _COLOURS.items():
        line = [r for r in rows if family in (r["family"], _MEMBERS.get(r["name"]))]
        line.sort(key=lambda row: row["ratio"])
        xs, ys = [r[x] for r in line], [r["efficiency"] for r in line]
        axes.plot(xs, ys, color=colour, linewidth=2, marker="o", markersize=4, zorder=2)
    for row in rows:
        name, at = row["name"], (row[x], row["efficiency"])
        if row["family"] == "preset" and name != "pool":
            family = _MEMBERS.get(name)
            colour = _RED if name == "auto" else _COLOURS[family] if family else GREY
            marker, size = ("*", 260) if name == "auto" else ("o", 55)
            axes.scatter(*at, s=size, color=colour, marker=marker, linewidth=0, zorder=4)
            label, weight = _NAMES[name], "bold"
        else:
            colour, label, weight = _COLOURS[_MEMBERS.get(name, row["family"])], "", "normal"
            label = _LINES[_MEMBERS.get(name, row["family"])]
        if name in places:
            right, up, side = places[name]
            axes.annotate(
                label,
                at,
                (right, up),
                textcoords="offset points",
                ha=side,
                color=colour,
                fontsize=10,
                fontweight=weight,
            )


def _budget(axes: Axes, left: float, right: float, least: float, text: str, at: float) -> None:
    axes.fill_between([left, right], least, 1.0, color=GREY, alpha=0.1, linewidth=0, zorder=0)
    axes.text(at, least + 0.008, text, color=GREY, fontsize=9, va="bottom")


if __name__ == "__main__":
    main()
