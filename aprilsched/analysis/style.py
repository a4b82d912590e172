"""How pictures look: one palette that color-blind people can tell apart, one set of sizes."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aprilsched.analysis.colours import PART_COLOURS

__all__ = ["GREY", "PALETTE", "PART_COLOURS", "finish", "new_figure", "save"]

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito, 2008: the eight-colour set without black."""
GREY = "#555555"

_DPI = 110
_TITLE = 12
_TEXT = 10


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches. No pyplot: nothing global, no display needed."""
    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def finish(axes: Axes, *, title: str, x: str, y: str, pad: float = 8) -> None:
    """Title, labels and a quiet frame."""
    axes.set_title(title, fontsize=_TITLE, loc="left", pad=pad)
    axes.set_xlabel(x, fontsize=_TEXT)
    axes.set_ylabel(y, fontsize=_TEXT)
    axes.tick_params(labelsize=_TEXT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, the same bytes for the same figure."""
    figure.savefig(path, dpi=_DPI, format="png", metadata={"Software": None})
