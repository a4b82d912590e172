"""Pictures of runs, for people who have not read the code. Each function gives a figure."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from aprilsched.analysis.run import Run
from aprilsched.analysis.series import bars, in_flight, lengths_of, window_end
from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure, save

__all__ = ["comparison", "lengths", "save", "timeline", "utilization"]

_SHOWN_ROLLOUTS = 240
_SHOWN_BATCHES = 5
_LABEL_SHARE = 0.1
"""Of the axes' width, that the name of a batch needs."""
_ABOVE_LABELS = 22
"""Points between a title and axes that have their batches named in between."""


def timeline(run: Run, *, title: str = "", batches: int = _SHOWN_BATCHES) -> Figure:
    """When each rollout was generated, coloured by the policy version that sampled it."""
    figure = new_figure(10, 6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    end = window_end(run, batches)
    _draw_bars(upper, run, end)
    _mark_batches(upper, run, end, labels=True)
    finish(
        upper,
        title=f"{_prefix(title)}each line is a response, its colour the policy that sampled it",
        x="",
        y="responses, in order of launch",
        pad=_ABOVE_LABELS,
    )
    upper.set_yticks([])
    _draw_in_flight(lower, run, end, GREY, "")
    _mark_batches(lower, run, end, labels=False)
    finish(lower, title="", x="seconds", y="in flight")
    return figure


def utilization(run: Run, *, title: str = "", batches: int = _SHOWN_BATCHES) -> Figure:
    """How many responses the engines work on, over time."""
    figure = new_figure(9, 3.2)
    axes = figure.subplots()
    end = window_end(run, batches)
    _draw_in_flight(axes, run, end, PALETTE[0], "")
    _mark_batches(axes, run, end, labels=True)
    finish(axes, title=title, x="seconds", y="responses in flight", pad=_ABOVE_LABELS)
    return figure


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
        title=f"{_prefix(title)}is the first batch too short?",
        x="response length in tokens",
        y="share of responses longer than that",
    )
    return figure


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


# --- parts of a timeline -------------------------------------------------------------------------


def _draw_bars(axes: Axes, run: Run, end: float) -> None:
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
            axes.axvspan(pause.start, pause.end, color="0.8", linewidth=0)
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


def _mark_batches(axes: Axes, run: Run, end: float, *, labels: bool) -> None:
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


def _draw_tail(axes: Axes, sample: NDArray[np.int64], colour: str, label: str) -> None:
    ordered = np.sort(sample)
    if ordered.size:
        share = 1 - np.arange(ordered.size) / ordered.size
        axes.step(ordered, share, where="post", color=colour, linewidth=2, label=label)


# --- parts of a comparison -----------------------------------------------------------------------


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
    end = min(window_end(run, _SHOWN_BATCHES) for run in runs.values())
    for name, run in runs.items():
        times, counts = in_flight(run, end)
        axes.step(times, counts, where="post", color=colours[name], linewidth=1.6, label=name)
    axes.set_xlim(0, end)
    # Room for the legend above the lines.
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


def _prefix(title: str) -> str:
    return f"{title}: " if title else ""


def _gain(rate: float, base: float, *, first: bool) -> str:
    return "" if first or not base else f"  ({rate / base - 1:+.0%})"


def _burn_in(runs: Mapping[str, Run]) -> int:
    return max((run.summary.steady_state.burn_in for run in runs.values()), default=0)
