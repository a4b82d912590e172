"""The pictures that the notebooks draw: a run over time, its engines, lengths and staleness.

:func:`draw` draws the charts of a report (:mod:`aprilsched.observe.report.chart_model`) with
matplotlib.
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis as AxesAxis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.distributions import KaplanMeier
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.observe.figures.batch_figures import staleness_of
from aprilsched.observe.figures.engine_time import BUSY, PART_INDEX, PART_LABELS, PARTS, Part
from aprilsched.observe.figures.run_figures import BiasFigures
from aprilsched.observe.log.lengths_of_run import distribution_of
from aprilsched.observe.log.over_time import bars, in_flight, tokens_by_class, window_end
from aprilsched.observe.log.run import Run
from aprilsched.observe.log.usage import RunUsage
from aprilsched.observe.plots import SHOWN_BATCHES
from aprilsched.observe.report.chart_model import (
    GREY,
    INK,
    PALETTE,
    PART_COLOURS,
    STALENESS_COLOURS,
    Axis,
    Chart,
    Series,
    ink_on,
)
from aprilsched.observe.report.shared_charts import (
    Curve,
    bias_over_batches,
    longer_than,
    parts_over_time,
    responses,
    staleness_by_batch,
    time_by_part,
)
from aprilsched.observe.report.style import finish, new_figure

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


_SHOWN_ROLLOUTS = 400
_LABEL_SHARE = 0.1
"""Share of the axes' width that the name of a batch needs."""
_HOW_TO_READ = (
    "A gap in a line: the response is not being generated, because its engine is paused or the "
    "schedule\nlets it wait; it continues with its tokens. Grey: an engine is paused. "
    "Dashed: a batch is full."
)
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
    words = "each line is a response, its colour the policy that sampled it"
    draw(
        upper,
        replace(chart, x=replace(chart.x, label="")),
        title=f"{title}: {words}" if title else words,
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
    figure.supxlabel(_HOW_TO_READ, fontsize=10, x=0.01, horizontalalignment="left")
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


TimeUnit: TypeAlias = Literal["share", "gpu_minutes_per_million"]

BINS = 240
_NAMED_SHARE = 0.002
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LawBand:
    """A confidence band of the length distribution: between `low` and `high` at each of `lengths`,
    float64 [n], and with a mean between `mean_low` and `mean_high`."""

    lengths: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean_low: float
    mean_high: float


def distribution_band(
    groups: Sequence[GroupLengths], *, level: float = 0.9, draws: int = 200, seed: int = 0
) -> LawBand:
    """A bootstrap band over whole groups. The members of a group are alike, so a formula for
    independent responses (Greenwood's) would give too narrow a band."""
    random = np.random.default_rng(seed)
    grid = np.unique(np.geomspace(1, distribution_of(groups).end, 120).astype(np.int64))
    distributions = [distribution_of(_resampled(groups, random)) for _ in range(draws)]
    tails = (0.5 - level / 2, 0.5 + level / 2)
    low, high = np.quantile(
        [distribution.survival_at(grid) for distribution in distributions], tails, axis=0
    )
    mean_low, mean_high = np.quantile(
        [distribution.mean() for distribution in distributions], tails
    )
    return LawBand(
        lengths=grid, low=low, high=high, mean_low=float(mean_low), mean_high=float(mean_high)
    )


def _resampled(groups: Sequence[GroupLengths], random: np.random.Generator) -> list[GroupLengths]:
    return [groups[int(place)] for place in random.integers(0, len(groups), len(groups))]


def first_look(
    usages: Mapping[str, RunUsage],
    *,
    seconds: float,
    start: float = 0.0,
    unit: TimeUnit = "gpu_minutes_per_million",
    title: str = "",
) -> Figure:
    """One bar for each run with where its engines' time goes, and below them the runs from `start`
    on, above each other."""
    count = len(usages)
    figure = new_figure(11, 1.6 * count + 0.5 * count + 2.2)
    where, *over_time = figure.subplots(
        count + 1, 1, height_ratios=[0.5 * count + 0.5, *([1.6] * count)]
    )
    shown: set[Part] = set()
    for axes, (name, usage) in zip(over_time, usages.items(), strict=True):
        shown.update(draw_causes(axes, usage, start=start, end=start + seconds))
        axes.set_yticks([0, 0.5, 1])
        finish(axes, title=name, x="", y="slots")
    over_time[-1].set_xlabel("seconds", fontsize=10)
    # A name may continue after a colon; a bar has no room for that.
    draw_where(where, {name.split(":")[0]: u for name, u in usages.items()}, unit=unit)
    finish(where, title="What a million tokens cost in GPU-minutes", x="", y="")
    where.set_xticks([])
    where.spines["bottom"].set_visible(False)
    draw_legend(figure, shown)
    if title:
        figure.suptitle(title, fontsize=13, x=0.01, horizontalalignment="left")
    return figure


def engine_strip(usage: RunUsage, *, title: str = "", end: float | None = None) -> Figure:
    """Draw one row for each engine: how busy its slots are over time, and its mean at the right."""
    stop = usage.wall if end is None else end
    seconds = usage.series(BINS, end=stop)
    busy = busy_seconds(seconds) / np.maximum(seconds.sum(axis=2), 1e-12)
    figure = new_figure(10, 1.4 + 0.3 * len(usage.engines))
    axes = figure.subplots()
    full = PART_COLOURS["decode"]
    colours = LinearSegmentedColormap.from_list("busy", [f"{full}00", full])
    image = axes.imshow(
        busy.T, aspect="auto", cmap=colours, vmin=0, vmax=1, interpolation="nearest",
        extent=(0, stop, len(usage.engines) - 0.5, -0.5),
    )  # fmt: skip
    means = busy_seconds(seconds).sum(axis=0) / np.maximum(seconds.sum(axis=(0, 2)), 1e-12)
    names = zip(usage.engines, means.tolist(), strict=True)
    axes.set_yticks(range(len(usage.engines)), [f"{name}   {mean:.0%}" for name, mean in names])
    bar = figure.colorbar(image, ax=axes, pad=0.01, ticks=[0, 0.5, 1], format="{x:.0%}")
    bar.set_label("busy share of its slots", fontsize=9)
    finish(axes, title=title, x="seconds", y="engine, and its mean")
    return figure


def tail_of(lengths: NDArray[np.int64]) -> Curve:
    """Return the share of these lengths, int64 [n], that are longer than each."""
    return np.sort(lengths), 1 - np.arange(lengths.size) / max(1, lengths.size)


def length_curve(
    distribution: KaplanMeier,
    *,
    delivered: NDArray[np.int64],
    band: LawBand | None = None,
    truth: NDArray[np.int64] | None = None,
    title: str = "",
) -> Figure:
    """Shares of responses longer than a length: delivered ones, the estimate with its band, and
    the `truth` (lengths int64 [n]) if known. Both axes are logarithmic."""
    figure = new_figure(9, 4.8)
    axes = figure.subplots()
    if band is not None:
        axes.fill_between(
            band.lengths, band.low, band.high, color=PALETTE[0], alpha=0.2, linewidth=0,
            label="its 90 % band (chance alone)",
        )  # fmt: skip
    times = np.append(distribution.lengths, [distribution.end] if distribution.tail > 0 else [])
    shares = np.append(
        distribution.survival, [distribution.survival[-1]] if distribution.tail > 0 else []
    )
    curves = {
        f"estimated from all that was started: mean {distribution.mean():,.0f}": (
            (times, shares), PALETTE[0], 2.2,
        ),
        f"delivered: mean {delivered.mean():,.0f}": (tail_of(delivered), PALETTE[5], 2.0),
    }  # fmt: skip
    drawn_from = "the length distribution of the workload"
    if truth is not None:
        drawn_from = f"{drawn_from}: mean {truth.mean():,.0f}"
        curves[drawn_from] = (tail_of(truth), GREY, 2.0)
    draw(axes, longer_than(curves, dotted=[drawn_from]), title=title, legend="lower left")
    axes.set_xlim(left=60)
    axes.set_ylim(bottom=2e-3)
    return figure


def estimate_by_batch(
    *,
    delivered: Sequence[float],
    estimated: Sequence[float],
    bands: Sequence[LawBand],
    truth: float | None = None,
    title: str = "",
) -> Figure:
    """Mean lengths after each batch: of the delivered responses, and of the
    estimated length distribution."""
    figure = new_figure(9, 3.8)
    axes = figure.subplots()
    batches = np.arange(1, len(delivered) + 1)
    axes.fill_between(
        batches, [band.mean_low for band in bands], [band.mean_high for band in bands],
        color=PALETTE[0], alpha=0.2, linewidth=0,
    )  # fmt: skip
    series = [
        Series(name=label, x=batches, y=values, colour=colour)
        for values, colour, label in (
            (estimated, PALETTE[0], "estimated from all that was started (with 90 % band)"),
            (delivered, PALETTE[5], "mean of what was delivered"),
        )
    ]
    if truth is not None:
        series.append(
            Series(
                name="the true mean", x=batches, y=[truth] * batches.size, colour=GREY, dash="dot"
            )
        )
    chart = Chart(
        series=series,
        x=Axis(label="batches delivered", unit="whole"),
        y=Axis(label="mean length in tokens", unit="tokens"),
    )
    draw(axes, chart, title=title, legend="lower right")
    axes.set_ylim(bottom=0)
    return figure


def staleness(run: Run, *, title: str = "") -> Figure:
    """Draw the staleness of each batch's tokens in versions."""
    tokens = tokens_by_class(run, len(STALENESS_COLOURS))
    shares = tokens / np.maximum(tokens.sum(axis=1, keepdims=True), 1)
    figure = new_figure(9, 4.2)
    chart = staleness_by_batch(range(1, len(shares) + 1), shares.T.tolist())
    draw(figure.subplots(), chart, title=title, legend="right")
    return figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenths:
    """Delivered responses by tenths of equal number, the shortest first; 10 entries each."""

    mean_length: list[float]
    staleness_mean: list[float]
    off_policy_share: list[float]


def tenths(run: Run) -> Tenths:
    """Return the staleness of the sampled tokens by tenths of the responses' lengths."""
    delivered = [(rollout, d.version) for d in run.deliveries for rollout in d.rollouts]
    lengths = np.array([rollout.tokens for rollout, _ in delivered])
    ages = np.array([staleness_of(rollout, version)[:3] for rollout, version in delivered])
    parts = np.array_split(np.argsort(lengths, kind="stable"), 10)
    sums = [ages[part].sum(axis=0) for part in parts]
    return Tenths(
        mean_length=[float(lengths[part].mean()) for part in parts],
        staleness_mean=[float(total / sampled) for sampled, _, total in sums],
        off_policy_share=[float(stale / sampled) for sampled, stale, _ in sums],
    )


def staleness_by_length(run: Run, *, title: str = "") -> Figure:
    """Draw the mean staleness of the tokens for each tenth of the responses, the shortest first."""
    found = tenths(run)
    figure = new_figure(9, 3.8)
    bar = Series(
        kind="bar",
        name="",
        x=[f"{length:,.0f}" for length in found.mean_length],
        y=found.staleness_mean,
        colour=PALETTE[2],
        texts=[f"{share:.0%}" for share in found.off_policy_share],
    )
    x = Axis(label="mean length of each tenth of the responses", categories=True)
    y = Axis(label="mean staleness in versions", from_zero=True)
    draw(figure.subplots(), Chart(series=[bar], x=x, y=y), title=title, legend="")
    return figure


def bias_by_batch(
    runs: Mapping[str, BiasFigures], *, predicted: bool = False, title: str = ""
) -> Figure:
    """Draw the relative difference between the mean of all delivered lengths and the true mean,
    after each batch.

    Args:
        predicted: the part that follows from the responses in flight alone, drawn as a dashed line.
            The difference between the two is chance or a censor.
    """
    figure = new_figure(9, 4.2)
    found = {name: figures.transient for name, figures in runs.items()}
    chart = bias_over_batches(found, colours=PALETTE, predicted=predicted)
    draw(figure.subplots(), chart, title=title, legend="lower right")
    return figure


class Figures(Protocol):
    """The figures of a policy that are drawn; rows of ``aprilsched simulate`` have them."""

    @property
    def policy(self) -> str: ...
    @property
    def step_efficiency(self) -> float | None: ...
    @property
    def staleness_mean(self) -> float | None: ...
    @property
    def step_s(self) -> float | None: ...


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
        [staleness for staleness, _ in places], [speed for _, speed in places],
        color=PALETTE[0], marker="o", markersize=7, linewidth=2, label=name,
    )  # fmt: skip
    for label, row in line.items():
        _mark(axes, label, row, PALETTE[0], above=False)
    for place, (label, row) in enumerate((others or {}).items()):
        colour = PALETTE[(5, 2, 3)[place % 3]]
        if (spot := _place(row)) is not None:
            axes.scatter(*spot, s=150, marker="D", color=colour, zorder=3, label=label)
        _mark(axes, label, row, colour, above=True)
    _draw_plane(axes, title=title)
    if name:
        axes.legend(frameon=False, fontsize=10, loc="lower right")
    return figure


def _draw_plane(axes: Axes, *, title: str) -> None:
    """Draw the axes of speed and its price, and the bound of speed."""
    axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
    axes.margins(x=0.08)
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter("{x:.0%}")
    finish(
        axes,
        title=title,
        x="price: mean staleness, updates",
        y="speed: best possible time / time",
    )
    axes.annotate(
        "the bound of any schedule", (0.99, 0.985), xycoords=("axes fraction", "data"),
        fontsize=10, color=GREY, horizontalalignment="right", verticalalignment="top",
    )  # fmt: skip
    axes.grid(alpha=0.25)


def _place(row: Figures) -> tuple[float, float] | None:
    if row.step_efficiency is None or row.staleness_mean is None:
        return None
    return row.staleness_mean, row.step_efficiency


def _mark(axes: Axes, label: str, row: Figures, colour: str, *, above: bool) -> None:
    place = _place(row)
    if place is not None:
        axes.annotate(
            label, place, xytext=(0, 10 if above else -18), textcoords="offset points",
            fontsize=11, color=colour, horizontalalignment="left" if place[0] < 0.05 else "center",
            fontweight="bold" if above else "normal",
        )  # fmt: skip
