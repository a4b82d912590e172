"""The picture that ``aprilsched simulate`` draws: policies side by side."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aprilsched.kernel.values.extras import extra
from aprilsched.observe.log.over_time import in_flight, window_end
from aprilsched.observe.log.run import Run

with extra("plots"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from aprilsched.observe.report.style import GREY, PALETTE, finish, new_figure

SHOWN_BATCHES = 5


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
