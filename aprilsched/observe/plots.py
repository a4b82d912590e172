"""The pictures of ``aprilsched simulate`` (policies side by side) and ``aprilsched frontier``."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprilsched.kernel.values.extras import extra
from aprilsched.observe.log.over_time import in_flight, window_end
from aprilsched.observe.log.run import Run
from aprilsched.simulation.frontier import FrontierPoint

with extra("plots"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    from aprilsched.observe.report.style import GREY, PALETTE, finish, new_figure

SHOWN_BATCHES = 5
COLOURS = (*PALETTE[:6], GREY)
"""The palette with grey instead of yellow, which a thin line on white does not show."""
MARKERS = "os*D^vPXp"
"""Together with the colours they distinguish 63 lines."""
_SHIFTS = [(0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (-1, 1), (1, -1), (-1, -1), (0, 2), (0, -2)]
"""The directions from a point in which a place for its label is tried, in this order."""


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


def frontier(points: Sequence[FrontierPoint], *, width: float = 9.0, height: float = 5.6) -> Figure:
    """Draw speed against staleness, one line for each family of arms; the size is in inches.

    Bars are the smallest and the largest of several seeds. A label is left out if it would cover
    another label, a point or a line at every place.
    """
    figure = new_figure(width, height)
    axes = figure.subplots()
    names = [point.arm.partition("@")[0] for point in points]
    colours = dict(zip(dict.fromkeys(names), cycle(COLOURS), strict=False))
    for (name, colour), marker in zip(colours.items(), cycle(MARKERS), strict=False):
        own = [point for point, family in zip(points, names, strict=True) if family == name]
        own.sort(key=lambda point: point.staleness)
        means, speeds = [p.staleness for p in own], [p.tokens_per_s for p in own]
        axes.plot(
            means, speeds, color=colour, marker=marker, markersize=8, linewidth=1.8,
            label=name if own[0].siblings else f"groups: {name}",
        )  # fmt: skip
        axes.hlines(
            speeds, *np.transpose([p.staleness_range for p in own]), colors=colour, linewidth=1
        )
        low, high = np.transpose([p.tokens_per_s_range for p in own])
        axes.vlines(means, low, high, colors=colour, linewidth=1)
    axes.margins(x=0.06, y=0.1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25)
    title = "Speed and staleness (better: up and left)"
    finish(
        axes, title=title, x="mean staleness of delivered tokens, versions", y="delivered tokens/s"
    )
    figure.legend(
        loc="outside lower center", ncols=max(1, int(width / 1.5)), frameon=False, fontsize=10
    )
    figure.draw_without_rendering()  # lays the axes out, so that places in pixels are known
    _label(axes, points, [colours[name] for name in names], figure.dpi / 72)
    return figure


def _label(
    axes: Axes, points: Sequence[FrontierPoint], colours: Sequence[str], unit: float
) -> None:
    """Label each point where the label covers nothing; `unit` is a typographic point in pixels."""
    inside, taken = axes.get_window_extent(), list[Bbox]()
    to_pixels: Callable[[Any], NDArray[np.float64]] = axes.transData.transform
    for line in axes.lines:
        spots = to_pixels(line.get_xydata())
        dense: NDArray[np.float64] = np.linspace(spots[:-1], spots[1:], 40).reshape(-1, 2)
        taken += [Bbox([at - unit, at + unit]) for at in dense]
        taken += [Bbox([at - 5 * unit, at + 5 * unit]) for at in spots]
    for point, colour in zip(points, colours, strict=True):
        at = (point.staleness, point.tokens_per_s)
        text = axes.annotate(
            point.arm.rpartition("@")[2], at, (0, 0), textcoords="offset points", fontsize=10,
            color=colour, ha="center", va="center",
        )  # fmt: skip
        spot, size = to_pixels(at), np.array(text.get_window_extent().size) / 2
        for shift in np.array(_SHIFTS) * (size + 7 * unit):
            box = Bbox([spot + shift - size, spot + shift + size])
            fits = np.array_equal(Bbox.union([inside, box]), inside)
            if fits and not box.count_overlaps(taken):
                text.set_position(tuple(shift / unit))
                taken.append(box)
                break
        else:
            text.remove()


def _draw_speed(axes: Axes, runs: Mapping[str, Run], colours: Mapping[str, str]) -> None:
    rates = [run.summary.steady_state.delivered_tokens_per_s or 0.0 for run in runs.values()]
    drawn = axes.barh(list(runs), rates, color=[colours[name] for name in runs], height=0.6)
    gains = [f"  ({rate / rates[0] - 1:+.0%})" if rates[0] else "" for rate in rates]
    labels = [f"{rate:,.0f}{gain}" for rate, gain in zip(rates, ["", *gains[1:]], strict=True)]
    axes.bar_label(drawn, labels=labels, padding=4, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, max([*rates, 1.0]) * 1.3)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    burn_in = max(run.summary.steady_state.burn_in for run in runs.values())
    title = f"Speed once it is steady (after {burn_in} batches)"
    finish(axes, title=title, x="delivered tokens per second", y="")


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
    axes.axhline(1, color=GREY, linewidth=1, linestyle=":")
    axes.set_xlim(-0.05, 1.05)
    axes.set_ylim(0, 1.05)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:.0%}")
    finish(
        axes,
        title=title,
        x="price: share of tokens that an older policy sampled",
        y="speed: best possible time / time",
    )
    axes.annotate(
        "the bound of any schedule", (0.99, 0.985), xycoords=("axes fraction", "data"),
        fontsize=10, color=GREY, horizontalalignment="right", verticalalignment="top",
    )  # fmt: skip
    axes.grid(alpha=0.25)


def _draw_activity(axes: Axes, runs: Mapping[str, Run], colours: Mapping[str, str]) -> None:
    end = min(window_end(run, SHOWN_BATCHES) for run in runs.values())
    most = 1.0
    for name, run in runs.items():
        times, counts = in_flight(run, end)
        axes.step(times, counts, where="post", color=colours[name], linewidth=1.6, label=name)
        most = max(most, 1.25 * float(counts.max()))  # leaves room for the legend above the lines
    axes.set_xlim(0, end)
    axes.set_ylim(0, most)
    axes.legend(frameon=False, fontsize=10, loc="upper right")
    finish(axes, title="Engine activity: low is idle", x="seconds", y="responses in flight")


def _draw_mean_lengths(axes: Axes, runs: Mapping[str, Run], colours: Mapping[str, str]) -> None:
    for name, run in runs.items():
        means = run.summary.bias.delivered_mean_length_by_batch
        batches = np.arange(1, len(means) + 1)
        values = np.cumsum(means) / batches
        axes.plot(batches, values, color=colours[name], linewidth=2.2, label=name)
    mean = next(iter(runs.values())).summary.bias.workload_mean_length
    if mean is not None:
        axes.axhline(mean, color=GREY, linewidth=1, linestyle=":")
        axes.annotate(
            "the workload's mean", (0.99, mean), xycoords=("axes fraction", "data"),
            xytext=(0, 4), textcoords="offset points", fontsize=9, color=GREY,
            horizontalalignment="right",
        )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, fontsize=10, loc="lower right")
    title = "Delivered lengths: short ones come first"
    finish(axes, title=title, x="batch", y="mean length of all so far")
