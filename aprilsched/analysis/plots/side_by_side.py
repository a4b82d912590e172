"""Policies side by side: speed, its price, what the engines do, what the trainer gets."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from aprilsched.analysis.plots.over_time import SHOWN_BATCHES
from aprilsched.analysis.run import Run
from aprilsched.analysis.series import in_flight, window_end
from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure

__all__ = ["comparison"]


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
