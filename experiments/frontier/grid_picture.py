"""Draws the grid of workloads: nine length laws with one cap, and the middle law with others."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from aprilsched.analysis.style import GREY, PALETTE, new_figure, save
from experiments.frontier.results import HERE, section

__all__ = ["main"]

_BLUE, _ORANGE, _GREEN, _, _, _RED, _ = PALETTE
_LOOKS = {
    "sync": (GREY, "o", "wait for all", 6, -4, "left"),
    "april": (_ORANGE, "o", "APRIL", 5, -13, "center"),
    "copris": (_BLUE, "o", "CoPRIS", 5, -13, "center"),
    "buckets": (_GREEN, "o", "buckets", -7, -9, "right"),
    "auto": (_RED, "*", "auto", -6, 6, "right"),
}
_CAPS = (8192, 16_384, 32_768)


def main() -> None:
    rows = section("grid")
    figure = new_figure(13, 8)
    figure.suptitle(
        "Auto is as fast as APRIL or faster, mostly with fewer off-policy tokens",
        x=0.01,
        ha="left",
        fontsize=13,
    )
    parts: Any = figure.subfigures(1, 2, width_ratios=(3, 2))
    wide, narrow = parts
    wide.suptitle("lognormal, cap 8k: spread, and share that a prompt's responses have in common")
    narrow.suptitle(r"$\sigma$ = 0.9, share 0.6: longer caps, heavier tails")
    square = wide.subplots(3, 3, sharex=True, sharey=True)
    for i, sigma in enumerate((0.7, 0.9, 1.1)):
        for j, share in enumerate((0.3, 0.6, 0.9)):
            found = _where(rows, law="lognormal", cap=8192, sigma=sigma, within_group=share)
            _panel(square[i, j], found, rf"$\sigma$ = {sigma}, share {share}", labels=i == j == 0)
    others = narrow.subplots(3, 2, sharex=True, sharey=True)
    for i, cap in enumerate(_CAPS):
        for j, law in enumerate(("lognormal", "log_t")):
            found = _where(rows, law=law, cap=cap, sigma=0.9, within_group=0.6)
            _panel(others[i, j], found, f"{law.replace('_', '-')}, cap {cap // 1024}k")
    wide.supxlabel("off-policy share", fontsize=10)
    wide.supylabel("efficiency", fontsize=10)
    narrow.supxlabel("off-policy share", fontsize=10)
    save(figure, HERE / "grid.png")


def _where(rows: list[dict[str, Any]], **known: float | str) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[name] == value for name, value in known.items())]


def _panel(axes: Axes, rows: list[dict[str, Any]], title: str, *, labels: bool = False) -> None:
    for row in rows:
        colour, marker, label, x, y, side = _LOOKS[row["policy"]]
        at = (row["off_policy"], row["efficiency"])
        axes.scatter(*at, s=130 if marker == "*" else 45, color=colour, marker=marker, zorder=3)
        if row["policy"] == "april":
            # What is better than APRIL in both lies in here.
            axes.fill_between([0, at[0]], at[1], 1, color=_ORANGE, alpha=0.1, linewidth=0)
        if labels:
            axes.annotate(
                label, at, (x, y), textcoords="offset points", ha=side, color=colour, fontsize=9
            )
    axes.set_title(title, fontsize=10, loc="left")
    axes.set(xlim=(-0.05, 1.02), ylim=(0.3, 0.95))
    axes.tick_params(labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
