"""Pictures that the notebooks draw, in addition to those of :mod:`aprilsched.observe.plots`."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

from aprilsched.kernel.core.lengths.laws import KaplanMeier
from aprilsched.kernel.core.lengths.observed import GroupLengths
from aprilsched.observe.figures.engine_time import Part
from aprilsched.observe.figures.run_figures import BiasFigures
from aprilsched.observe.log.lengths_of_run import law_of
from aprilsched.observe.log.over_time import tokens_by_class
from aprilsched.observe.log.run import Run
from aprilsched.observe.log.usage import RunUsage
from aprilsched.observe.plots import (
    BINS,
    TimeUnit,
    busy_seconds,
    draw_causes,
    draw_deciles,
    draw_legend,
    draw_plane,
    draw_where,
)
from aprilsched.observe.report.chart_model import AGE_COLOURS, Axis, Chart, Series
from aprilsched.observe.report.shared_charts import (
    ages_by_batch,
    bias_over_batches,
    longer_than,
    tail_of,
)
from aprilsched.observe.report.style import GREY, PALETTE, PART_COLOURS, draw, finish, new_figure


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LawBand:
    """A confidence band of the law: between `low` and `high` at each of `lengths`, float64 [n], and
    with a mean between `mean_low` and `mean_high`."""

    lengths: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean_low: float
    mean_high: float


def law_band(
    groups: Sequence[GroupLengths], *, level: float = 0.9, draws: int = 200, seed: int = 0
) -> LawBand:
    """A bootstrap band over whole groups. The members of a group are alike, so a formula for
    independent responses (Greenwood's) would give too narrow a band."""
    random = np.random.default_rng(seed)
    grid = np.unique(np.geomspace(1, law_of(groups).end, 120).astype(np.int64))
    laws = [law_of(_resampled(groups, random)) for _ in range(draws)]
    tails = (0.5 - level / 2, 0.5 + level / 2)
    low, high = np.quantile([law.survival_at(grid) for law in laws], tails, axis=0)
    mean_low, mean_high = np.quantile([law.mean() for law in laws], tails)
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
    curves = {
        f"estimated from all that was started: mean {law.mean():,.0f}": (
            (times, shares), PALETTE[0], 2.2,
        ),
        f"delivered: mean {delivered.mean():,.0f}": (tail_of(delivered), PALETTE[5], 2.0),
    }  # fmt: skip
    drawn_from = "the law that lengths were drawn from"
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
    """Mean lengths after each batch: of what was delivered until then, and of the estimated law."""
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
    """Draw the ages of each batch's tokens in versions."""
    tokens = tokens_by_class(run, len(AGE_COLOURS))
    shares = tokens / np.maximum(tokens.sum(axis=1, keepdims=True), 1)
    figure = new_figure(9, 4.2)
    chart = ages_by_batch(range(1, len(shares) + 1), shares.T.tolist())
    draw(figure.subplots(), chart, title=title, legend="right")
    return figure


def staleness_by_length(figures: BiasFigures, *, title: str = "") -> Figure:
    """Draw the mean age of the tokens for each tenth of the responses, the shortest first."""
    figure = new_figure(9, 3.8)
    axes = figure.subplots()
    draw_deciles(axes, figures)
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
    def off_policy_share(self) -> float | None: ...
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
    draw_plane(axes, title=title)
    if name:
        axes.legend(frameon=False, fontsize=10, loc="lower right")
    return figure


def _place(row: Figures) -> tuple[float, float] | None:
    if row.step_efficiency is None or row.off_policy_share is None:
        return None
    return row.off_policy_share, row.step_efficiency


def _mark(axes: Axes, label: str, row: Figures, colour: str, *, above: bool) -> None:
    place = _place(row)
    if place is not None:
        axes.annotate(
            label, place, xytext=(0, 10 if above else -18), textcoords="offset points",
            fontsize=11, color=colour, horizontalalignment="left" if place[0] < 0.05 else "center",
            fontweight="bold" if above else "normal",
        )  # fmt: skip
