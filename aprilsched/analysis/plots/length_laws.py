"""Length laws: what was delivered, what is estimated, what is true where that is known."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from aprilsched.analysis.lengths_known import LawBand
from aprilsched.analysis.run import Run
from aprilsched.analysis.series import lengths_of
from aprilsched.analysis.style import GREY, PALETTE, finish, new_figure, prefix
from aprilsched.core.lengths.laws import KaplanMeier

__all__ = ["estimate_by_batch", "length_law", "lengths"]


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
