"""The style of pictures: one palette that colour-blind people can distinguish, and one set of
sizes."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from aprilsched.analysis.colours import GREY, PALETTE, PART_COLOURS

__all__ = ["GREY", "PALETTE", "PART_COLOURS", "finish", "ink_on", "new_figure", "prefix", "save"]

_DPI = 110
_TITLE = 12
_TEXT = 10


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches. It does not use pyplot, so it needs no global state
    and no display."""
    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def finish(axes: Axes, *, title: str, x: str, y: str, pad: float = 8) -> None:
    """Set the title and labels, and a frame without the upper and right line."""
    axes.set_title(title, fontsize=_TITLE, loc="left", pad=pad)
    axes.set_xlabel(x, fontsize=_TEXT)
    axes.set_ylabel(y, fontsize=_TEXT)
    axes.tick_params(labelsize=_TEXT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def ink_on(colour: str) -> str:
    """Black or white, whichever can be read better on `colour` (by its luminance, as in WCAG)."""
    red, green, blue = to_rgb(colour)
    return (
        "white" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.3 else "black"
    )


def prefix(title: str) -> str:
    """The text that stands before the title of a picture: `title` and a colon, or nothing."""
    return f"{title}: " if title else ""


def save(figure: Figure, path: Path) -> None:
    """Write a PNG. The same figure gives the same bytes."""
    figure.savefig(path, dpi=_DPI, format="png", metadata={"Software": None})
