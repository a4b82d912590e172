"""Pictures of runs, for people who have not read the code. Each function returns a figure.

A notebook shows a figure at the end of a cell, and :func:`save` writes it to a file.
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.values.extras import extra
from aprilsched.observe.figures.engine_time import BUSY, PART_INDEX, PART_LABELS, PARTS, Part
from aprilsched.observe.figures.run_figures import BiasFigures
from aprilsched.observe.log.over_time import bars, in_flight, window_end
from aprilsched.observe.log.run import Run
from aprilsched.observe.log.usage import RunUsage
from aprilsched.observe.report.chart_model import Axis, Chart, Series, ink_on
from aprilsched.observe.report.shared_charts import (
    bias_over_batches,
    longer_than,
    parts_over_time,
    responses,
    staleness_by_tenth,
    time_by_part,
)

with extra("plots"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from aprilsched.observe.report.style import (
        GREY,
        PALETTE,
        PART_COLOURS,
        draw,
        finish,
        new_figure,
        prefix,
        save,
    )


__all__ = [
    "bias",
    "causes",
    "comparison",
    "save",
    "timeline",
    "where_time_goes",
]


# Draws a run over time: which responses were generated when, and how many at once.


SHOWN_BATCHES = 5
_SHOWN_ROLLOUTS = 400
_LABEL_SHARE = 0.1
"""Share of the axes' width that the name of a batch needs."""
ABOVE_LABELS = 22
"""Distance in points between a title and axes, if the names of batches are between them."""


def timeline(run: Run, *, title: str = "", batches: int = SHOWN_BATCHES) -> Figure:
    """Draw when each rollout was generated, coloured by the policy version that sampled it."""
    figure = new_figure(10, 6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    end = window_end(run, batches)
    shown = bars(run, end, at_most=_SHOWN_ROLLOUTS)
    deliveries = [delivery.time for delivery in run.deliveries if delivery.time <= end]
    chart = responses(
        shown,
        start=0.0,
        end=end,
        marks=deliveries,
        pauses=[(pause.start, pause.end) for pause in run.pauses if pause.start <= end],
        width=max(0.7, 250 / max(1, len(shown))),
    )
    words = f"{prefix(title)}each line is a response, its colour the policy that sampled it"
    draw(
        upper,
        replace(chart, x=replace(chart.x, label="")),
        title=words,
        legend="",
        pad=ABOVE_LABELS,
    )
    handles = [Line2D([], [], color=key.css, linewidth=5, label=key.name) for key in chart.keys]
    upper.legend(
        handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=10
    )
    _name_batches(upper, deliveries, end)
    times, counts = in_flight(run, end)
    lower.fill_between(times, counts, step="post", color=GREY, alpha=0.2, linewidth=0)
    line = Series(name="", x=times, y=counts, colour=GREY, width=1.4, step=True)
    seconds, count = Axis(label="seconds", range=(0, end)), Axis(label="in flight", from_zero=True)
    draw(lower, Chart(series=[line], x=seconds, y=count, marks=deliveries, legend=False))
    return figure


def _name_batches(axes: Axes, deliveries: Sequence[float], end: float) -> None:
    """Write the batches above their ends, where there is room."""
    for index, time in enumerate(deliveries):
        if time - (deliveries[index - 1] if index else 0.0) >= _LABEL_SHARE * end:
            axes.annotate(
                f"batch {index + 1} full", (time, 1.0), xycoords=("data", "axes fraction"),
                xytext=(0, 3), textcoords="offset points", fontsize=10,
                horizontalalignment="right", verticalalignment="bottom",
            )  # fmt: skip


# Draws the engines' time: by part, over time, and for each engine.
#
# The time is counted per slot (see :mod:`aprilsched.observe.figures.engine_time`), so a single
# response on an engine with 32 slots fills 1/32 of the picture, whereas NVML would show 100 %.


TimeUnit: TypeAlias = Literal["share", "gpu_minutes_per_million"]

BINS = 240
_NAMED_SHARE = 0.01
"""Smallest share of a part in the legend. The colour of a smaller part would be invisible."""
_UNITS: dict[TimeUnit, str] = {
    "share": "share of the engines' time",
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
    draw_legend(figure, shown)
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
    draw_legend(figure, shown)
    finish(axes, title=title, x=_UNITS[unit], y="")
    return figure


def draw_causes(
    axes: Axes, usage: RunUsage, *, start: float = 0.0, end: float | None = None
) -> list[Part]:
    """Draw the parts over time, with names in those that have room; return the drawn parts."""
    stop = usage.wall if end is None else end
    seconds = usage.series(BINS, start=start, end=stop).sum(axis=1)
    share = seconds / np.maximum(seconds.sum(axis=1, keepdims=True), 1e-12)
    edges = np.linspace(start, stop, BINS + 1)
    shown = _shown(seconds.sum(axis=0))
    shares = {part: share[:, PART_INDEX[part]] for part in shown}
    draw(axes, parts_over_time(shares, start=start, stops=edges[1:].tolist()), legend="")
    below = np.zeros(BINS)
    for part in shown:
        above = below + share[:, PART_INDEX[part]]
        _name(axes, part, below, above, edges)
        below = above
    return shown


def draw_where(axes: Axes, usages: Mapping[str, RunUsage], *, unit: TimeUnit) -> list[Part]:
    """Draw one bar for each run; return the parts that are large enough for the legend."""
    rows = [_row(usage, unit) for usage in usages.values()]
    # All parts are drawn; otherwise a bar would end before its total. The legend omits parts that
    # are too small to see.
    named: list[Part] = [
        part
        for part, index in PART_INDEX.items()
        if any(row[index] > _NAMED_SHARE * row.sum() for row in rows)
    ]
    totals = [float(row.sum()) for row in rows]
    chart = time_by_part(
        {
            name: {part: float(row[index]) for part, index in PART_INDEX.items()}
            for name, row in zip(usages, rows, strict=True)
        },
        x=Axis(
            label=_UNITS[unit],
            unit="share" if unit == "share" else "",
            range=(0, max(totals, default=1.0) * (1.0 if unit == "share" else 1.12)),
        ),
        colours=PART_COLOURS,
        labels=PART_LABELS,
        written=lambda value: _number(value, unit),
    )
    draw(axes, chart, legend="")
    for place, total in enumerate(totals if unit != "share" else []):
        axes.annotate(
            _number(total, unit), (total, place), xytext=(6, 0), textcoords="offset points",
            fontsize=11, fontweight="bold", verticalalignment="center",
        )  # fmt: skip
    return named


def _number(value: float, unit: TimeUnit) -> str:
    """Return the text that is written into a bar."""
    if unit == "share":
        return f"{value:.0%}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _row(usage: RunUsage, unit: TimeUnit) -> NDArray[np.float64]:
    seconds = usage.seconds.sum(axis=0)
    if unit == "share":
        return seconds / (float(seconds.sum()) or 1.0)
    return seconds / 60 / max(1, sum(usage.tokens)) * 1e6


def _shown(seconds: NDArray[np.float64]) -> list[Part]:
    total = float(seconds.sum())
    shown: list[Part] = [p for p, index in PART_INDEX.items() if seconds[index] > 1e-4 * total]
    return shown


def busy_seconds(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    return seconds[..., [PART_INDEX[part] for part in BUSY]].sum(axis=-1)


def _name(
    axes: Axes,
    part: Part,
    below: NDArray[np.float64],
    above: NDArray[np.float64],
    edges: NDArray[np.float64],
) -> None:
    """Write the name of a part where its area has enough room, if anywhere."""
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


def draw_legend(figure: Figure, shown: Collection[Part]) -> None:
    ordered: list[Part] = [part for part in PARTS if part in shown]
    figure.legend(
        handles=[Patch(color=PART_COLOURS[part], label=PART_LABELS[part]) for part in ordered],
        loc="outside lower center", ncols=min(4, max(1, len(ordered))), frameon=False, fontsize=10,
    )  # fmt: skip


# Draws policies side by side: speed, its cost, engine activity, and delivered lengths.


def comparison(runs: Mapping[str, Run]) -> Figure:
    """Draw policies side by side: speed, its cost, engine activity, and delivered lengths."""
    figure = new_figure(12, 8)
    (speed, price), (activity, mean) = figure.subplots(2, 2)
    colours = {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(runs)}
    _draw_speed(speed, runs, colours)
    _draw_price(price, runs, colours)
    _draw_activity(activity, runs, colours)
    _draw_mean_lengths(mean, runs, colours)
    return figure


def _draw_speed(axes: Axes, runs: Mapping[str, Run], colours: Mapping[str, str]) -> None:
    rates = [run.summary.steady_state.delivered_tokens_per_s or 0.0 for run in runs.values()]
    drawn = axes.barh(list(runs), rates, color=[colours[name] for name in runs], height=0.6)
    base = rates[0]
    labels = [f"{rate:,.0f}" + _gain(rate, base, first=rate is base) for rate in rates]
    axes.bar_label(drawn, labels=labels, padding=4, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, max([*rates, 1.0]) * 1.3)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    burn_in = _burn_in(runs)
    finish(
        axes,
        title=f"Speed once it is steady (after {burn_in} batches)",
        x="delivered tokens per second",
        y="",
    )


def _draw_price(axes: Axes, runs: Mapping[str, Run], colours: Mapping[str, str]) -> None:
    for name, run in runs.items():
        share = run.summary.steady_state.off_policy_token_share
        efficiency = run.summary.step_efficiency
        if share is None or efficiency is None:
            continue
        axes.scatter([share], [efficiency], s=120, color=colours[name], zorder=3)
        axes.annotate(
            name, (share, efficiency), xytext=(0, 10), textcoords="offset points",
            fontsize=11, horizontalalignment="center",
        )  # fmt: skip
    draw_plane(axes, title="Its price: up and to the left is better")


def draw_plane(axes: Axes, *, title: str) -> None:
    """Draw the axes of speed and its price, and the bound of speed."""
    plane = Chart(
        series=[],
        x=Axis(label="price: share of tokens that an older policy sampled", unit="share",
               range=(-0.05, 1.05)),
        y=Axis(label="speed: best possible time / time", unit="share", range=(0, 1.05)),
        level=1,
    )  # fmt: skip
    draw(axes, plane, title=title, legend="")
    axes.annotate(
        "what no schedule can pass", (0.99, 0.985), xycoords=("axes fraction", "data"),
        fontsize=10, color=GREY, horizontalalignment="right", verticalalignment="top",
    )  # fmt: skip
    axes.grid(alpha=0.25)


def _draw_activity(axes: Axes, runs: Mapping[str, Run], colours: Mapping[str, str]) -> None:
    end = min(window_end(run, SHOWN_BATCHES) for run in runs.values())
    lines = [(name, *in_flight(run, end)) for name, run in runs.items()]
    # The axis leaves room for the legend above the lines.
    most = 1.25 * max(float(counts.max()) for _, _, counts in lines)
    chart = Chart(
        series=[
            Series(name=name, x=times, y=counts, colour=colours[name], width=1.6, step=True)
            for name, times, counts in lines
        ],
        x=Axis(label="seconds", range=(0, end)),
        y=Axis(label="responses in flight", range=(0, max(1.0, most))),
    )
    draw(axes, chart, title="What the engine works on: low is idle", legend="upper right")


def _draw_mean_lengths(axes: Axes, runs: Mapping[str, Run], colours: Mapping[str, str]) -> None:
    means = {
        name: _running_mean(run.summary.bias.delivered_mean_length_by_batch)
        for name, run in runs.items()
    }
    mean = next(iter(runs.values())).summary.bias.workload_mean_length
    chart = Chart(
        series=[
            Series(name=name, x=np.arange(1, values.size + 1), y=values, colour=colours[name])
            for name, values in means.items()
        ],
        x=Axis(label="batch", unit="whole"),
        y=Axis(label="mean length of all so far", unit="tokens", from_zero=True),
        level=mean,
    )
    words = "What the trainer gets: short answers first, then all of them"
    draw(axes, chart, title=words, legend="lower right")
    if mean is not None:
        axes.annotate(
            "the workload's mean", (0.99, mean), xycoords=("axes fraction", "data"),
            xytext=(0, 4), textcoords="offset points", fontsize=9, color=GREY,
            horizontalalignment="right",
        )  # fmt: skip


def _running_mean(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    return np.cumsum(array) / np.arange(1, array.size + 1)


def _gain(rate: float, base: float, *, first: bool) -> str:
    return "" if first or not base else f"  ({rate / base - 1:+.0%})"


def _burn_in(runs: Mapping[str, Run]) -> int:
    return max((run.summary.steady_state.burn_in for run in runs.values()), default=0)


# Draws one picture of a run's bias: whether responses are too short, whether this is a transient,
# and which responses are stale.


def bias(figures: BiasFigures, *, title: str = "") -> Figure:
    """Draw delivered and drawn lengths, the transient by batch, and staleness by length. A panel
    whose figures are unknown stays empty."""
    figure = new_figure(14, 4.4)
    laws, transient, stale = figure.subplots(1, 3)
    curves = {
        f"{name}: mean {law.mean:,.0f}": ((law.lengths, law.longer), colour, width)
        for name, law, colour, width in (
            ("drawn (estimate)", figures.drawn, GREY, 4.0),
            ("delivered", figures.delivered, PALETTE[5], 1.8),
        )
        if law is not None
    }
    draw(laws, longer_than(curves), title="Are the responses too short?", legend="lower left")
    over_batches = bias_over_batches({"": figures.transient}, colours=PALETTE, predicted=True)
    words = "Does it go away? A lasting gap is a censor"
    draw(transient, over_batches, title=words, legend="lower right")
    draw_deciles(stale, figures)
    notes = [text for text in (title, _note(figures)) if text]
    if notes:
        figure.suptitle("\n".join(notes), fontsize=11, x=0.01, horizontalalignment="left")
    return figure


def draw_deciles(axes: Axes, figures: BiasFigures) -> None:
    chart = staleness_by_tenth({"": figures.by_length_decile}, colours=[PALETTE[2]])
    draw(axes, chart, title="Who is stale? (above: off-policy share)", legend="")
    axes.tick_params(axis="x", labelsize=8)


def _note(figures: BiasFigures) -> str:
    warning = figures.censoring.warning
    return "" if warning is None else f"Warning: {warning.split(';')[0]}."
