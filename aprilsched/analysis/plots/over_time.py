"""Draws a run over time: which responses were generated when, and how many at once."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from aprilsched.analysis.run import Run
from aprilsched.analysis.series import bars, in_flight, window_end
from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure, prefix

__all__ = ["ABOVE_LABELS", "SHOWN_BATCHES", "draw_bars", "mark_batches", "timeline", "utilization"]

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
