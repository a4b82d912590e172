"""Draws the gain over the spread of the length law, with the published gains as bands."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure, save
from experiments.april_gains.gains import RESULT
from experiments.frontier.results import section

__all__ = ["PUBLISHED", "main"]

PUBLISHED = {
    "4B": {"DAPO-Math": 0.24, "DeepScaleR": 0.31, "DeepMath": 0.35},
    "8B": {"DAPO-Math": 0.26, "DeepScaleR": 0.35, "DeepMath": 0.44},
}
_BLUE, _ORANGE, _GREEN, _PINK, *_ = PALETTE
_COLOURS = {600.0: _BLUE, 2000.0: _ORANGE, 6000.0: _GREEN, 12_000.0: _PINK}

_TICKS = (0.25, 0.5, 1.0, 2.0, 3.5)


def main() -> None:
    figure = new_figure(12, 5.2)
    panels = figure.subplots(1, 2, sharey=True)
    curves = section("curves", RESULT)
    for axes, size in zip(panels, PUBLISHED, strict=True):
        _panel(axes, [row for row in curves if row["size"] == size], size)
    panels[0].set_ylabel("gain in generated tokens/s over waiting, steady state", fontsize=10)
    figure.suptitle(
        "Generation alone gives APRIL more than it published, unless responses come near the cap",
        x=0.01,
        ha="left",
        fontsize=13,
    )
    save(figure, Path(__file__).with_name("gains.png"))


def _panel(axes: Axes, curves: list[dict[str, Any]], size: str) -> None:
    published = PUBLISHED[size]
    least, most = 1 + min(published.values()), 1 + max(published.values())
    axes.axhspan(least, most, color=GREY, alpha=0.2, linewidth=0)
    names = ", ".join(f"{name} +{gain:.0%}" for name, gain in published.items())
    axes.text(0.27, 1.18, f"published: {names}", color=GREY, fontsize=9, va="top")
    for median, colour in _COLOURS.items():
        line = [row for row in curves if row["median"] == median]
        if not line:
            continue
        xs = [row["sigma"] for row in line]
        axes.plot(xs, [1 + row["generated"] for row in line], color=colour, linewidth=2, marker="o")
        last = line[-1]
        axes.annotate(
            f"median {median:,.0f}",
            (last["sigma"], 1 + last["generated"]),
            (6, 0),
            textcoords="offset points",
            color=colour,
            fontsize=10,
        )
    finish(axes, title=f"{size}", x=r"$\sigma$ of the log length (cap 16,384)", y="")
    axes.set(xlim=(0.25, 1.36), ylim=(1.1, 5), yscale="log")
    axes.set_yticks([1 + gain for gain in _TICKS], [f"+{gain:.0%}" for gain in _TICKS])
    axes.minorticks_off()


if __name__ == "__main__":
    main()
