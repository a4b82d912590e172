"""Draws one picture of a run's bias: are responses too short, does that go away, who is stale?"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Literal

import numpy as np

from aprilsched.analysis.run import Run
from aprilsched.extras import extra
from aprilsched.telemetry.figures import BiasFigures, DecileFigures, LawFigures, TransientFigures

with extra("plots"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure

__all__ = ["bias", "draw_deciles", "draw_survival", "draw_transient", "figure_of"]


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
    _legend(axes, "lower left")
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
    _legend(axes, "lower right")
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


def _legend(axes: Axes, where: Literal["lower left", "lower right"]) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=10, loc=where)
