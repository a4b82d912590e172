"""Draws how old the tokens are that a trainer gets, and whether its batches are too short."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from aprilsched.analysis.bias_plots import draw_deciles
from aprilsched.analysis.colours import AGE_COLOURS
from aprilsched.analysis.run import Run
from aprilsched.analysis.style import GREY, PALETTE, finish, ink_on, new_figure
from aprilsched.telemetry.figures import BiasFigures

__all__ = ["bias_by_batch", "staleness", "staleness_by_length", "tokens_by_age"]


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
