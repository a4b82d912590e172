"""Pictures of runs, for people who have not read the code. Each function gives a figure.

A figure is shown by a notebook as the last thing in a cell, and written by :func:`save`.
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aprilsched.analysis.colours import AGE_COLOURS, PART_LABELS
from aprilsched.analysis.lengths_of_run import LawBand
from aprilsched.analysis.run import Run, bars, in_flight, lengths_of, window_end
from aprilsched.analysis.usage import RunUsage
from aprilsched.core.lengths.laws import KaplanMeier
from aprilsched.extras import extra
from aprilsched.telemetry.engine_time import BUSY, PART_INDEX, PARTS, Part
from aprilsched.telemetry.figures import BiasFigures, DecileFigures, LawFigures, TransientFigures

with extra("plots"):
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    from aprilsched.analysis.style import (
        GREY,
        PALETTE,
        PART_COLOURS,
        finish,
        ink_on,
        new_figure,
        prefix,
        save,
    )

__all__ = [
    "bias",
    "bias_by_batch",
    "causes",
    "comparison",
    "engine_strip",
    "estimate_by_batch",
    "first_look",
    "frontier",
    "length_law",
    "lengths",
    "save",
    "staleness",
    "staleness_by_length",
    "timeline",
    "tokens_by_age",
    "utilization",
    "what_if",
    "where_time_goes",
]


# --- over time -----------------------------------------------------------------------------------

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
    draw_bars(upper, run, end)
    mark_batches(upper, run, end, labels=True)
    finish(
        upper,
        title=f"{prefix(title)}each line is a response, its colour the policy that sampled it",
        x="",
        y="responses, in order of launch",
        pad=ABOVE_LABELS,
    )
    upper.set_yticks([])
    _draw_in_flight(lower, run, end, GREY, "")
    mark_batches(lower, run, end, labels=False)
    finish(lower, title="", x="seconds", y="in flight")
    return figure


def utilization(run: Run, *, title: str = "", batches: int = SHOWN_BATCHES) -> Figure:
    """Draw how many responses the engines work on, over time."""
    figure = new_figure(9, 3.2)
    axes = figure.subplots()
    end = window_end(run, batches)
    _draw_in_flight(axes, run, end, PALETTE[0], "")
    mark_batches(axes, run, end, labels=True)
    finish(axes, title=title, x="seconds", y="responses in flight", pad=ABOVE_LABELS)
    return figure


# --- parts ----------------------------------------------------------------------------------------


def draw_bars(axes: Axes, run: Run, end: float) -> None:
    shown = bars(run, end, at_most=_SHOWN_ROLLOUTS)
    versions = sorted({version for bar in shown for _, _, version in bar})
    colour = {version: PALETTE[version % len(PALETTE)] for version in versions}
    rows = [(row, piece) for row, bar in enumerate(shown) for piece in bar]
    axes.add_collection(
        LineCollection(
            [((start, row), (stop, row)) for row, (start, stop, _) in rows],
            colors=[colour[version] for _, (_, _, version) in rows],
            linewidths=max(0.7, 250 / max(1, len(shown))),
            capstyle="butt",
        )
    )
    for pause in run.pauses:
        if pause.start <= end:
            axes.axvspan(pause.start, pause.end, color=GREY, alpha=0.35, linewidth=0)
    axes.set_xlim(0, end)
    axes.set_ylim(len(shown), -1)
    handles = [Line2D([], [], color=colour[v], linewidth=5, label=str(v)) for v in versions]
    axes.legend(
        handles=handles,
        title="policy version",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
        fontsize=10,
    )


def mark_batches(axes: Axes, run: Run, end: float, *, labels: bool) -> None:
    before = 0.0
    for delivery in run.deliveries:
        if delivery.time > end:
            break
        axes.axvline(delivery.time, color="black", linewidth=1, linestyle=(0, (4, 2)))
        wide = delivery.time - before >= _LABEL_SHARE * end
        before = delivery.time
        if labels and wide:
            axes.annotate(
                f"batch {delivery.index + 1} full",
                (delivery.time, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 3),
                textcoords="offset points",
                fontsize=10,
                horizontalalignment="right",
                verticalalignment="bottom",
            )


def _draw_in_flight(axes: Axes, run: Run, end: float, colour: str, label: str) -> None:
    times, counts = in_flight(run, end)
    axes.fill_between(times, counts, step="post", color=colour, alpha=0.2, linewidth=0)
    axes.step(times, counts, where="post", color=colour, linewidth=1.4, label=label)
    axes.set_xlim(0, end)
    axes.set_ylim(bottom=0)


# --- usage parts ---------------------------------------------------------------------------------

# Draws where the engines' time went: by part, over time, and for each engine.
#
# The time of slots is divided (see :mod:`aprilsched.telemetry.engine_time`), so a single response
# on an engine with 32 slots fills a thirty-second of the picture, where NVML would show 100 %.


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


# --- first look ----------------------------------------------------------------------------------

# One picture of what scheduling is about: runs over the same time, and where their time goes.


def first_look(
    usages: Mapping[str, RunUsage],
    *,
    seconds: float,
    start: float = 0.0,
    unit: TimeUnit = "gpu_minutes_per_million",
    title: str = "",
) -> Figure:
    """The runs above each other from `start` on, and below one bar for each with where its
    engines' time goes."""
    count = len(usages)
    figure = new_figure(11, 1.6 * count + 0.5 * count + 2.2)
    *over_time, where = figure.subplots(
        count + 1, 1, height_ratios=[*([1.6] * count), 0.5 * count + 0.5]
    )
    shown: set[Part] = set()
    for axes, (name, usage) in zip(over_time, usages.items(), strict=True):
        shown.update(draw_causes(axes, usage, start=start, end=start + seconds))
        axes.set_yticks([0, 0.5, 1])
        finish(axes, title=name, x="", y="slots")
    over_time[-1].set_xlabel("seconds", fontsize=10)
    # A name may go on after a colon; beside a bar there is no room for that.
    draw_where(where, {name.split(":")[0]: u for name, u in usages.items()}, unit=unit)
    finish(where, title="What a million tokens cost in GPU-minutes", x="", y="")
    where.set_xticks([])
    where.spines["bottom"].set_visible(False)
    parts: list[Part] = [part for part in PARTS if part in shown]
    figure.legend(
        handles=[Patch(color=PART_COLOURS[part], label=PART_LABELS[part]) for part in parts],
        loc="outside lower center", ncols=min(4, len(parts)), frameon=False, fontsize=10,
    )  # fmt: skip
    if title:
        figure.suptitle(title, fontsize=13, x=0.01, horizontalalignment="left")
    return figure


# --- side by side --------------------------------------------------------------------------------

# Policies side by side: speed, its price, what the engines do, what the trainer gets.


def comparison(runs: Mapping[str, Run]) -> Figure:
    """Policies side by side: speed, its price, what the engines do, what the trainer gets."""
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
        steady = run.summary.steady_state
        share, efficiency = steady.off_policy_token_share, steady.efficiency
        if share is None or efficiency is None:
            continue
        axes.scatter([share], [efficiency], s=120, color=colours[name], zorder=3)
        axes.annotate(
            name, (share, efficiency), xytext=(0, 10), textcoords="offset points",
            fontsize=11, horizontalalignment="center",
        )  # fmt: skip
    axes.set_xlim(-0.08, 1.05)
    axes.set_ylim(0, 1.05)
    axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
    axes.annotate(
        "what no schedule can pass", (1.04, 0.985), fontsize=9, color=GREY,
        horizontalalignment="right", verticalalignment="top",
    )  # fmt: skip
    axes.grid(alpha=0.25)
    finish(
        axes,
        title="Its price: up and to the left is better",
        x="share of tokens that an older policy sampled",
        y="efficiency (best possible time / time)",
    )


def _draw_activity(axes: Axes, runs: Mapping[str, Run], colours: Mapping[str, str]) -> None:
    end = min(window_end(run, SHOWN_BATCHES) for run in runs.values())
    for name, run in runs.items():
        times, counts = in_flight(run, end)
        axes.step(times, counts, where="post", color=colours[name], linewidth=1.6, label=name)
    axes.set_xlim(0, end)
    # This leaves room for the legend above the lines.
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=10, ncols=min(4, len(runs)), loc="upper right")
    finish(
        axes,
        title="What the engine works on: low is idle",
        x="seconds",
        y="responses in flight",
    )


def _draw_mean_lengths(axes: Axes, runs: Mapping[str, Run], colours: Mapping[str, str]) -> None:
    for name, run in runs.items():
        means = run.summary.bias.delivered_mean_length_by_batch
        axes.plot(_running_mean(means), color=colours[name], linewidth=1.8, label=name)
    mean = next(iter(runs.values())).summary.bias.workload_mean_length
    if mean is not None:
        axes.axhline(mean, color=GREY, linewidth=1, linestyle=":")
        axes.annotate(
            "the workload's mean", (0.99, mean), xycoords=("axes fraction", "data"),
            xytext=(0, 4), textcoords="offset points", fontsize=9, color=GREY,
            horizontalalignment="right",
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=10, ncols=len(runs), loc="lower right")
    finish(
        axes,
        title="What the trainer gets: short answers first, then all of them",
        x="batch",
        y="mean length of all so far",
    )


def _running_mean(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    return np.cumsum(array) / np.arange(1, array.size + 1)


def _gain(rate: float, base: float, *, first: bool) -> str:
    return "" if first or not base else f"  ({rate / base - 1:+.0%})"


def _burn_in(runs: Mapping[str, Run]) -> int:
    return max((run.summary.steady_state.burn_in for run in runs.values()), default=0)


# --- length laws ---------------------------------------------------------------------------------

# Length laws: what was delivered, what is estimated, what is true where that is known.


def lengths(run: Run, *, title: str = "") -> Figure:
    """The tail of the delivered lengths: the first batch against all of them."""
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    _draw_tail(axes, lengths_of(run.deliveries), GREY, "all batches")
    _draw_tail(axes, lengths_of(run.deliveries[:1]), PALETTE[5], "first batch")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=10)
    finish(
        axes,
        title=f"{prefix(title)}is the first batch too short?",
        x="response length in tokens",
        y="share of responses longer than that",
    )
    return figure


def length_law(
    law: KaplanMeier,
    *,
    delivered: NDArray[np.int64],
    band: LawBand | None = None,
    truth: NDArray[np.int64] | None = None,
    title: str = "",
) -> Figure:
    """Shares of responses longer than a length: delivered ones, the estimate with its band, and
    the `truth` (lengths int64 [n]) where somebody knows it. Both axes are logarithmic."""
    figure = new_figure(9, 4.8)
    axes = figure.subplots()
    if band is not None:
        axes.fill_between(
            band.lengths, band.low, band.high, color=PALETTE[0], alpha=0.2, linewidth=0,
            label="its 90 % band (chance alone)",
        )  # fmt: skip
    times = np.append(law.lengths, [law.end] if law.tail > 0 else [])
    shares = np.append(law.survival, [law.survival[-1]] if law.tail > 0 else [])
    axes.step(
        times, shares, where="post", color=PALETTE[0], linewidth=2.2,
        label=f"estimated from all that was started: mean {law.mean():,.0f}",
    )  # fmt: skip
    if truth is not None:
        mean = f"the law that lengths were drawn from: mean {truth.mean():,.0f}"
        _draw_tail(axes, truth, GREY, mean, style=":")
    _draw_tail(axes, delivered, PALETTE[5], f"delivered: mean {delivered.mean():,.0f}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left=60)
    axes.set_ylim(bottom=2e-3)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda x, _: f"{x:.0%}" if x >= 0.01 else f"{x:.1%}")
    axes.legend(frameon=False, fontsize=10, loc="lower left")
    finish(
        axes,
        title=title,
        x="response length in tokens",
        y="share of responses longer than that",
    )
    return figure


def estimate_by_batch(
    *,
    delivered: Sequence[float],
    estimated: Sequence[float],
    bands: Sequence[LawBand],
    truth: float | None = None,
    title: str = "",
) -> Figure:
    """Mean lengths after each batch: of what was delivered until then, and of the estimated law."""
    figure = new_figure(9, 3.8)
    axes = figure.subplots()
    batches = np.arange(1, len(delivered) + 1)
    axes.fill_between(
        batches, [band.mean_low for band in bands], [band.mean_high for band in bands],
        color=PALETTE[0], alpha=0.2, linewidth=0,
    )  # fmt: skip
    for values, colour, label in (
        (estimated, PALETTE[0], "estimated from all that was started (with 90 % band)"),
        (delivered, PALETTE[5], "mean of what was delivered"),
    ):
        axes.plot(batches, values, color=colour, linewidth=2.2, marker="o", label=label)
    if truth is not None:
        axes.axhline(truth, color=GREY, linestyle=":", linewidth=2, label="the true mean")
    axes.set_xticks(batches)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, fontsize=10, loc="lower right")
    finish(axes, title=title, x="batches delivered", y="mean length in tokens")
    return figure


def _draw_tail(
    axes: Axes, sample: NDArray[np.int64], colour: str, label: str, *, style: str = "-"
) -> None:
    ordered = np.sort(sample)
    if ordered.size:
        share = 1 - np.arange(ordered.size) / ordered.size
        axes.step(
            ordered, share, where="post", color=colour, linewidth=2, label=label, linestyle=style
        )


# --- bias plots ----------------------------------------------------------------------------------

# Draws one picture of a run's bias: are responses too short, does that go away, who is stale?


with extra("plots"):
    from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure


def bias(run: Run, *, title: str = "") -> Figure:
    """Draw delivered and drawn lengths, the transient by batch, and staleness by length."""
    return figure_of(run.summary.bias, title=title)


def figure_of(figures: BiasFigures, *, title: str = "") -> Figure:
    """Draw the same from the figures alone. A panel whose figures are unknown stays empty."""
    figure = new_figure(14, 4.4)
    laws, transient, stale = figure.subplots(1, 3)
    draw_survival(laws, drawn=figures.drawn, delivered=figures.delivered)
    draw_transient(transient, figures.transient)
    draw_deciles(stale, figures.by_length_decile)
    notes = [text for text in (title, _note(figures)) if text]
    if notes:
        figure.suptitle("\n".join(notes), fontsize=11, x=0.01, horizontalalignment="left")
    return figure


def draw_survival(axes: Axes, *, drawn: LawFigures | None, delivered: LawFigures | None) -> None:
    """Draw the share of responses that are longer than a length. Both axes are logarithmic."""
    for law, colour, label, width in (
        (drawn, GREY, "drawn (estimate)", 4.0),
        (delivered, PALETTE[5], "delivered", 1.8),
    ):
        if law is None:
            continue
        # The last percentile is left out, because no response is longer. Percentiles in the
        # unresolved tail are left out, because their length is not known.
        share = 1 - np.arange(1, 100) / 100
        known = int((share > law.unresolved).sum())
        alpha = 0.5 if width > 2 else 1.0
        axes.plot(
            law.percentiles[:known],
            share[:known],
            color=colour,
            linewidth=width,
            alpha=alpha,
            label=label,
        )
        axes.plot([law.mean] * 2, [0.01, 1], color=colour, linewidth=1.2, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    _legend_below(axes, "lower left")
    finish(
        axes,
        title="Are the responses too short? (dotted: means)",
        x="response length in tokens",
        y="share of responses longer than that",
    )


def draw_transient(axes: Axes, figures: TransientFigures | None) -> None:
    """Draw the bias of everything delivered so far, measured and predicted."""
    if figures is not None:
        batches = np.arange(1, len(figures.measured_by_batch) + 1)
        for values, colour, label, style in (
            (figures.measured_by_batch, PALETTE[0], "measured", "-"),
            (figures.predicted_by_batch, PALETTE[1], "from what is in flight", "--"),
        ):
            axes.plot(
                batches, np.asarray(values) * 100, color=colour, linewidth=1.8,
                linestyle=style, label=label,
            )  # fmt: skip
    axes.axhline(0, color=GREY, linewidth=1, linestyle=":")
    _legend_below(axes, "lower right")
    finish(
        axes,
        title="Does it go away? A lasting gap is a censor",
        x="batches delivered",
        y="mean length so far, % off the law's",
    )


def draw_deciles(axes: Axes, figures: DecileFigures | None) -> None:
    """Draw the mean staleness of ten classes of length, with their off-policy share above."""
    if figures is not None:
        places = np.arange(len(figures.staleness_mean))
        bars = axes.bar(places, figures.staleness_mean, color=PALETTE[2], width=0.75)
        labels = [f"{share:.0%}" for share in figures.off_policy_token_share]
        axes.bar_label(bars, labels=labels, padding=2, fontsize=9)
        axes.set_xticks(places, [f"{length:,.0f}" for length in figures.mean_length])
        axes.tick_params(axis="x", labelsize=8)
    axes.margins(y=0.12)
    finish(
        axes,
        title="Who is stale? (above: off-policy share)",
        x="mean length of each tenth of the responses",
        y="mean staleness in versions",
    )


def _note(figures: BiasFigures) -> str:
    warning = figures.censoring.warning
    return "" if warning is None else f"Warning: {warning.split(';')[0]}."


def _legend_below(axes: Axes, where: Literal["lower left", "lower right"]) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=10, loc=where)


# --- stale ---------------------------------------------------------------------------------------

# Draws how old the tokens are that a trainer gets, and whether its batches are too short.


def tokens_by_age(run: Run) -> NDArray[np.int64]:
    """Delivered tokens by batch and age in versions, int64 [batches, oldest + 1]. Tokens of the
    environment have no version and are left out."""
    ages = [
        (place, max(0, delivery.version - segment.version), segment.end - segment.start)
        for place, delivery in enumerate(run.deliveries)
        for rollout in delivery.rollouts
        for segment in rollout.segments
        if segment.version >= 0
    ]
    counts = np.zeros((len(run.deliveries), 1 + max((a for _, a, _ in ages), default=0)), np.int64)
    for place, age, tokens in ages:
        counts[place, age] += tokens
    return counts


def staleness(run: Run, *, title: str = "") -> Figure:
    """Draw the ages of each batch's tokens in versions."""
    counts = tokens_by_age(run)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure = new_figure(9, 4.2)
    axes = figure.subplots()
    places = np.arange(1, len(counts) + 1)
    below = np.zeros(len(counts))
    oldest = len(AGE_COLOURS) - 1
    for age in range(min(counts.shape[1], oldest + 1)):
        share = shares[:, age] if age < oldest else shares[:, age:].sum(axis=1)
        colour = AGE_COLOURS[age]
        drawn = axes.bar(places, share, bottom=below, color=colour, width=0.8, label=_age(age))
        axes.bar_label(
            drawn, labels=[f"{s:.0%}" if s >= 0.06 else "" for s in share],
            label_type="center", fontsize=10, color=ink_on(colour),
        )  # fmt: skip
        below += share
    axes.set_xticks(places)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter("{x:.0%}")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], title="sampled by", loc="center left",
        bbox_to_anchor=(1, 0.5), frameon=False, fontsize=10,
    )  # fmt: skip
    finish(axes, title=title, x="batch", y="share of its tokens")
    return figure


def staleness_by_length(figures: BiasFigures, *, title: str = "") -> Figure:
    """Draw the mean age of the tokens for each tenth of the responses, the shortest first."""
    figure = new_figure(9, 3.8)
    axes = figure.subplots()
    draw_deciles(axes, figures.by_length_decile)
    axes.set_title(title, fontsize=12, loc="left")
    return figure


def bias_by_batch(
    runs: Mapping[str, BiasFigures], *, predicted: bool = False, title: str = ""
) -> Figure:
    """Draw the relative difference between the mean of all delivered lengths and that of the law,
    after each batch.

    Args:
        predicted: the part that follows from the responses in flight alone, drawn as a dashed line.
            The difference between the two is chance or a censor.
    """
    figure = new_figure(9, 4.2)
    axes = figure.subplots()
    axes.axhline(0, color=GREY, linewidth=1, linestyle=":")
    for place, (name, figures) in enumerate(runs.items()):
        transient = figures.transient
        if transient is None:
            continue
        colour = PALETTE[place % len(PALETTE)]
        batches = np.arange(1, len(transient.measured_by_batch) + 1)
        values = 100 * np.asarray(transient.measured_by_batch)
        axes.plot(batches, values, color=colour, linewidth=2.2, label=name)
        if predicted:
            expected = 100 * np.asarray(transient.predicted_by_batch)
            label = "what the responses in flight explain"
            axes.plot(batches, expected, color=colour, linewidth=1.4, linestyle="--", label=label)
    axes.legend(frameon=False, fontsize=10, loc="lower right")
    finish(axes, title=title, x="batches delivered", y="mean length so far, % off the law's")
    return figure


def _age(age: int) -> str:
    if age == 0:
        return "the newest policy"
    if age == len(AGE_COLOURS) - 1:
        return f"{age} or more versions before"
    return "the one before" if age == 1 else f"{age} versions before"


# --- plans ---------------------------------------------------------------------------------------

# Draws policies as points and bars: the frontier of speed and staleness, and the results of
# replays.


class Figures(Protocol):
    """The figures of a policy that are drawn; rows of ``aprilsched simulate`` and ``replay`` have
    them."""

    @property
    def policy(self) -> str: ...
    @property
    def efficiency(self) -> float | None: ...
    @property
    def off_policy_share(self) -> float | None: ...
    @property
    def seconds_a_batch(self) -> float | None: ...


def frontier(
    line: Mapping[str, Figures],
    others: Mapping[str, Figures] | None = None,
    *,
    name: str = "",
    title: str = "",
) -> Figure:
    """Draw speed against staleness: one family of policies as a line, others as points with
    labels."""
    figure = new_figure(9, 5)
    axes = figure.subplots()
    places = [place for row in line.values() if (place := _place(row)) is not None]
    axes.plot(
        [share for share, _ in places], [speed for _, speed in places],
        color=PALETTE[0], marker="o", markersize=7, linewidth=2, label=name,
    )  # fmt: skip
    for label, row in line.items():
        _mark(axes, label, row, PALETTE[0], above=False)
    for place, (label, row) in enumerate((others or {}).items()):
        colour = PALETTE[(5, 2, 3)[place % 3]]
        if (spot := _place(row)) is not None:
            axes.scatter(*spot, s=150, marker="D", color=colour, zorder=3, label=label)
        _mark(axes, label, row, colour, above=True)
    axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
    axes.annotate(
        "what no schedule can pass", (0.99, 0.985), xycoords=("axes fraction", "data"),
        fontsize=10, color=GREY, horizontalalignment="right", verticalalignment="top",
    )  # fmt: skip
    axes.set_xlim(-0.03, 1.0)
    axes.set_ylim(0, 1.04)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.25)
    if name:
        axes.legend(frameon=False, fontsize=10, loc="lower right")
    finish(
        axes,
        title=title,
        x="price: share of tokens that an older policy sampled",
        y="speed: best possible time / time",
    )
    return figure


def what_if(
    recorded: Figures,
    replayed: Sequence[Figures],
    *,
    run: Figures | None = None,
    title: str = "",
) -> Figure:
    """Draw the seconds a batch of a run, as recorded and as replayed under other policies.

    Args:
        run: a run under the policy of the last replay, which the replay has not used.
    """
    rows: list[tuple[str, Figures, str]] = [("the run as it was", recorded, GREY)]
    rows += [(f"replayed: {row.policy}", row, PALETTE[0]) for row in replayed]
    if run is not None:
        rows.append((f"run: {run.policy}", run, PALETTE[2]))
    figure = new_figure(9, 1.2 + 0.5 * len(rows))
    axes = figure.subplots()
    seconds = [row.seconds_a_batch or 0.0 for _, row, _ in rows]
    drawn = axes.barh(
        [name for name, _, _ in rows], seconds, color=[colour for _, _, colour in rows], height=0.66
    )
    labels = [
        f"{value:.1f} s"
        + ("" if row.off_policy_share is None else f", {row.off_policy_share:.0%} off-policy")
        for value, (_, row, _) in zip(seconds, rows, strict=True)
    ]
    axes.bar_label(drawn, labels=labels, padding=5, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max([*seconds, 1e-9]))
    finish(axes, title=title, x="seconds a batch, without the trainer's", y="")
    return figure


def _place(row: Figures) -> tuple[float, float] | None:
    if row.efficiency is None or row.off_policy_share is None:
        return None
    return row.off_policy_share, row.efficiency


def _mark(axes: Axes, label: str, row: Figures, colour: str, *, above: bool) -> None:
    place = _place(row)
    if place is not None:
        axes.annotate(
            label, place, xytext=(0, 10 if above else -18), textcoords="offset points",
            fontsize=11, color=colour, horizontalalignment="left" if place[0] < 0.05 else "center",
            fontweight="bold" if above else "normal",
        )  # fmt: skip
