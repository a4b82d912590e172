"""The style of pictures: one palette that colour-blind people can distinguish, one set of sizes,
and no background, so that a picture can be read on a light page and on a dark one.

:func:`new_figure` creates every picture of the project, including the experiments.
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis as AxesAxis
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.spines import Spine
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from aprilsched.observe.report.chart_model import (
    GREY,
    INK,
    PALETTE,
    PART_COLOURS,
    Axis,
    Chart,
    Series,
    ink_on,
)

__all__ = [
    "GREY",
    "INK",
    "PALETTE",
    "PART_COLOURS",
    "draw",
    "finish",
    "new_figure",
    "prefix",
    "save",
]

_DPI = 110
_TITLE = 12
_TEXT = 10
_BLACK = ("black", "k")


class _Picture(Figure):
    """A figure without a background, whose text and axes are in :data:`INK`.

    Elements that matplotlib draws in black by default are coloured when the figure is drawn, even
    in a notebook. matplotlib's settings are not used, because they are global and belong to the
    user.
    """

    def draw(self, renderer: RendererBase) -> None:
        self.patch.set_visible(False)
        for artist in self.findobj():
            match artist:
                case Axes():
                    artist.patch.set_visible(False)
                case Legend():
                    artist.set_frame_on(False)
                case Spine():
                    artist.set_edgecolor(INK)
                case Line2D() if artist.get_markeredgecolor() in _BLACK:
                    # Axis ticks are markers of a line, with a separate colour.
                    artist.set(color=INK, markeredgecolor=INK)
                case Text() | Line2D() if artist.get_color() in _BLACK:
                    artist.set_color(INK)
                case _:
                    pass
        super().draw(renderer)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, without a background. It does not use pyplot,
    so it needs neither global state nor a display."""
    return _Picture(figsize=(width, height), dpi=_DPI, layout="constrained")


def finish(axes: Axes, *, title: str, x: str, y: str, pad: float = 8) -> None:
    """Set the title and labels, and a frame without the upper and right line."""
    axes.set_title(title, fontsize=_TITLE, loc="left", pad=pad)
    axes.set_xlabel(x, fontsize=_TEXT)
    axes.set_ylabel(y, fontsize=_TEXT)
    axes.tick_params(labelsize=_TEXT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


_ROLES = {"@ink": INK, "@muted": GREY}
"""Colours of roles that can be read on light pages and on dark ones."""
_STYLES = {"solid": "-", "dash": "--", "dot": ":"}
_READABLE = 0.055
"""Smallest share of the longest bar at which a bar has room for a text."""


def draw(
    axes: Axes,
    chart: Chart,
    *,
    title: str = "",
    legend: Literal["best", "lower left", "lower right", "upper right", "right", ""] = "best",
    pad: float = 8,
) -> None:
    """Draw a chart, its axes and its legend: inside of the axes, at their right, or none."""
    below: NDArray[np.float64] | None = None
    for series in chart.series:
        values = np.asarray(series.y, dtype=np.float64)
        base = np.zeros(values.size) if below is None else below
        match series.kind:
            case "bar":
                _draw_bars(axes, series, chart, values, base)
            case "area":
                axes.fill_between(
                    np.asarray(series.x), base, base + values, step="post",
                    color=_colour(series), label=series.name, linewidth=0,
                )  # fmt: skip
            case "points":
                axes.scatter(series.x, values, color=_colour(series), label=series.name)
            case "line":
                axes.plot(
                    series.x, values, color=_colour(series), linewidth=series.width,
                    linestyle=_STYLES[series.dash], label=series.name, solid_capstyle="butt",
                    drawstyle="steps-post" if series.step else "default",
                )  # fmt: skip
        if chart.stacked or series.kind == "area":
            below = base + values
    for time in chart.marks:
        axes.axvline(time, color="black", linewidth=1, linestyle=(0, (4, 2)))
    for start, end in chart.pauses:
        axes.axvspan(start, end, color=GREY, alpha=0.35, linewidth=0)
    if chart.level is not None:
        axes.axhline(chart.level, color=GREY, linewidth=1, linestyle=":")
    if legend and chart.keys:
        beside = legend == "right"
        axes.legend(
            frameon=False, fontsize=10, loc="center left" if beside else legend,
            bbox_to_anchor=(1, 0.5) if beside else None, reverse=chart.stacked,
        )  # fmt: skip
    finish(axes, title=title, x=chart.x.label, y=chart.y.label, pad=pad)
    _scale(axes, axes.xaxis, chart.x)
    _scale(axes, axes.yaxis, chart.y)


def _draw_bars(
    axes: Axes,
    series: Series,
    chart: Chart,
    values: NDArray[np.float64],
    base: NDArray[np.float64],
) -> None:
    categories = (chart.y if chart.across else chart.x).categories
    places = np.arange(values.size) if categories else np.asarray(series.x)
    if chart.across:
        drawn = axes.barh(places, values, left=base, color=_colour(series), height=0.66)
        axes.set_yticks(places, [str(name) for name in series.x])
        axes.set_ylim(values.size - 0.5, -0.5)
    else:
        drawn = axes.bar(
            places, values, bottom=base, color=_colour(series), width=0.8, label=series.name
        )
        if categories:
            axes.set_xticks(places, [str(name) for name in series.x])
    if not chart.stacked:
        axes.bar_label(drawn, labels=series.texts, padding=2, fontsize=9)
        axes.margins(y=0.12)
        return
    totals = np.sum([np.asarray(each.y, dtype=np.float64) for each in chart.series], axis=0)
    axes.bar_label(
        drawn,
        labels=[
            text if value > _READABLE * totals.max() else ""
            for text, value in zip(series.texts, values, strict=True)
        ],
        label_type="center", fontsize=10, color=ink_on(str(_colour(series))),
    )  # fmt: skip


def _colour(series: Series) -> str | Sequence[str]:
    colour = series.colour
    return _ROLES.get(colour, colour) if isinstance(colour, str) else colour


def _scale(axes: Axes, axis: AxesAxis, of: Axis) -> None:
    if of.log:
        (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    match of.unit:
        case "share":
            axis.set_major_formatter(lambda x, _: f"{100 * x:.4g}%".replace("-", "\N{MINUS SIGN}"))
        case "tokens":
            axis.set_major_formatter("{x:,.0f}")
        case "whole":
            axis.set_major_locator(MaxNLocator(integer=True))
        case _:
            pass
    if of.ticks is not None:
        axis.set_ticks(list(of.ticks), list(of.ticks.values()))
    if of.from_zero:
        axes.set_ylim(bottom=0)
    if of.range is not None:
        (axes.set_xlim if axis is axes.xaxis else axes.set_ylim)(of.range)


def prefix(title: str) -> str:
    """Return the prefix of the title of a picture: `title` and a colon, or nothing."""
    return f"{title}: " if title else ""


def save(figure: Figure, path: Path) -> None:
    """Write a PNG. The same figure produces the same bytes."""
    figure.savefig(path, dpi=_DPI, format="png", metadata={"Software": None})
