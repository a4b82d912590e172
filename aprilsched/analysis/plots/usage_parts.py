"""Draws where the engines' time went: by part, over time, and for each engine.

The time of slots is divided (see :mod:`aprilsched.telemetry.engine_time`), so a single response on
an engine with 32 slots fills a thirty-second of the picture, where NVML would show 100 %.
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from aprilsched.analysis.colours import PART_LABELS
from aprilsched.analysis.style import PART_COLOURS, finish, ink_on, new_figure
from aprilsched.analysis.usage import RunUsage
from aprilsched.telemetry.engine_time import BUSY, PART_INDEX, PARTS, Part

__all__ = ["TimeUnit", "causes", "draw_causes", "draw_where", "engine_strip", "where_time_goes"]

TimeUnit: TypeAlias = Literal["share", "seconds", "gpu_minutes", "gpu_minutes_per_million"]

_BINS = 240
_NAMED_SHARE = 0.01
"""Smallest share of a part that is named in the legend. The colour of a smaller part could not be
seen."""
_UNITS: dict[TimeUnit, str] = {
    "share": "share of the engines' time",
    "seconds": "seconds of the run",
    "gpu_minutes": "GPU-minutes",
    "gpu_minutes_per_million": "GPU-minutes for a million generated tokens",
}
"""The label of the axis."""


def causes(
    usage: RunUsage, *, title: str = "", start: float = 0.0, end: float | None = None
) -> Figure:
    """Draw what the engines' slots do over time: busy parts below, and idle parts above by their
    cause."""
    figure = new_figure(10, 4)
    axes = figure.subplots()
    shown = draw_causes(axes, usage, start=start, end=end)
    _legend(figure, shown)
    finish(axes, title=title, x="seconds", y="share of all slots")
    return figure


def where_time_goes(
    usages: Mapping[str, RunUsage], *, unit: TimeUnit = "share", title: str = ""
) -> Figure:
    """Draw one bar for each run, divided into the parts of its engines' time.

    Shares add up to 100 % in every run. Minutes for a million tokens can be compared between runs.
    """
    figure = new_figure(10, 1.5 + 0.62 * len(usages))
    axes = figure.subplots()
    shown = draw_where(axes, usages, unit=unit)
    _legend(figure, shown)
    finish(axes, title=title, x=_UNITS[unit], y="")
    return figure


def engine_strip(usage: RunUsage, *, title: str = "", end: float | None = None) -> Figure:
    """Draw one row for each engine: how busy its slots are over time, and its mean at the right."""
    stop = usage.wall if end is None else end
    seconds = usage.series(_BINS, end=stop)
    busy = _busy(seconds) / np.maximum(seconds.sum(axis=2), 1e-12)
    figure = new_figure(10, 1.4 + 0.3 * len(usage.engines))
    axes = figure.subplots()
    full = PART_COLOURS["decode"]
    colours = LinearSegmentedColormap.from_list("busy", [f"{full}00", full])
    image = axes.imshow(
        busy.T, aspect="auto", cmap=colours, vmin=0, vmax=1, interpolation="nearest",
        extent=(0, stop, len(usage.engines) - 0.5, -0.5),
    )  # fmt: skip
    means = _busy(seconds).sum(axis=0) / np.maximum(seconds.sum(axis=(0, 2)), 1e-12)
    names = zip(usage.engines, means.tolist(), strict=True)
    axes.set_yticks(range(len(usage.engines)), [f"{name}   {mean:.0%}" for name, mean in names])
    bar = figure.colorbar(image, ax=axes, pad=0.01, ticks=[0, 0.5, 1], format="{x:.0%}")
    bar.set_label("busy share of its slots", fontsize=9)
    finish(axes, title=title, x="seconds", y="engine, and its mean")
    return figure


# --- into axes that are there --------------------------------------------------------------------


def draw_causes(
    axes: Axes, usage: RunUsage, *, start: float = 0.0, end: float | None = None
) -> list[Part]:
    """The names of the drawn parts, written into those that have room."""
    stop = usage.wall if end is None else end
    seconds = usage.series(_BINS, start=start, end=stop).sum(axis=1)
    share = seconds / np.maximum(seconds.sum(axis=1, keepdims=True), 1e-12)
    edges = np.linspace(start, stop, _BINS + 1)
    shown = _shown(seconds.sum(axis=0))
    below = np.zeros(_BINS)
    for part in shown:
        above = below + share[:, PART_INDEX[part]]
        axes.fill_between(
            edges, np.append(below, below[-1]), np.append(above, above[-1]),
            step="post", color=PART_COLOURS[part], linewidth=0,
        )  # fmt: skip
        _name(axes, part, below, above, edges)
        below = above
    axes.set_xlim(start, stop)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter("{x:.0%}")
    return shown


def draw_where(axes: Axes, usages: Mapping[str, RunUsage], *, unit: TimeUnit) -> list[Part]:
    """The parts that are large enough to be named."""
    rows = [_row(usage, unit) for usage in usages.values()]
    # All parts are drawn, because a bar would otherwise end before its total. Very small ones are
    # not in the legend, because nobody could see them.
    named: list[Part] = [
        part
        for part, index in PART_INDEX.items()
        if any(row[index] > _NAMED_SHARE * row.sum() for row in rows)
    ]
    widest = max((float(row.sum()) for row in rows), default=1.0)
    for place, row in enumerate(rows):
        left = 0.0
        for part in PARTS:
            width = float(row[PART_INDEX[part]])
            axes.barh(place, width, left=left, color=PART_COLOURS[part], height=0.66)
            if width > 0.055 * widest:
                axes.annotate(
                    _number(width, unit), (left + width / 2, place), fontsize=11,
                    color=ink_on(PART_COLOURS[part]), horizontalalignment="center",
                    verticalalignment="center",
                )  # fmt: skip
            left += width
        if unit != "share":
            axes.annotate(
                _number(float(row.sum()), unit), (left, place), xytext=(6, 0),
                textcoords="offset points", fontsize=11, fontweight="bold",
                verticalalignment="center",
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), list(usages))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, widest * (1.0 if unit == "share" else 1.12))
    if unit == "share":
        axes.xaxis.set_major_formatter("{x:.0%}")
    return named


def _number(value: float, unit: TimeUnit) -> str:
    """The text that is written into a bar."""
    if unit == "share":
        return f"{value:.0%}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _row(usage: RunUsage, unit: TimeUnit) -> NDArray[np.float64]:
    seconds = usage.seconds.sum(axis=0)
    if unit == "share":
        return seconds / (float(seconds.sum()) or 1.0)
    if unit == "seconds":
        return seconds / max(1, len(usage.engines))
    if unit == "gpu_minutes":
        return seconds / 60
    return seconds / 60 / max(1, sum(usage.tokens)) * 1e6


def _shown(seconds: NDArray[np.float64]) -> list[Part]:
    total = float(seconds.sum())
    shown: list[Part] = [p for p, index in PART_INDEX.items() if seconds[index] > 1e-4 * total]
    return shown


def _busy(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return seconds[..., [PART_INDEX[part] for part in BUSY]].sum(axis=-1)


def _name(
    axes: Axes,
    part: Part,
    below: NDArray[np.float64],
    above: NDArray[np.float64],
    edges: NDArray[np.float64],
) -> None:
    """The position at which the area is high enough over the width of the name; None if there is
    none."""
    name = PART_LABELS[part]
    width = int(len(below) * (0.0075 * len(name) + 0.015))
    heights = above - below
    windows = np.lib.stride_tricks.sliding_window_view
    floor = windows(below, width).max(axis=1)
    room = windows(above, width).min(axis=1) - floor
    place = int(np.argmax(room))
    if room[place] < 0.09 or heights.max() <= 0:
        return
    x = (edges[place] + edges[place + width]) / 2
    axes.annotate(
        name, (x, floor[place] + room[place] / 2), fontsize=11, color=ink_on(PART_COLOURS[part]),
        horizontalalignment="center", verticalalignment="center",
    )  # fmt: skip


def _legend(figure: Figure, shown: Sequence[Part]) -> None:
    ordered: list[Part] = [part for part in PARTS if part in shown]
    figure.legend(
        handles=[Patch(color=PART_COLOURS[part], label=PART_LABELS[part]) for part in ordered],
        loc="outside lower center", ncols=min(4, max(1, len(ordered))), frameon=False, fontsize=10,
    )  # fmt: skip
