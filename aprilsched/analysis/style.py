"""The style of pictures: one palette that colour-blind people can distinguish, one set of sizes,
and no background, so that a picture can be read on a light page and on a dark one.

Every picture of the project, also of its experiments, is made by :func:`new_figure`.
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.spines import Spine
from matplotlib.text import Text

from aprilsched.analysis.colours import GREY, INK, PALETTE, PART_COLOURS

__all__ = [
    "GREY",
    "INK",
    "PALETTE",
    "PART_COLOURS",
    "finish",
    "ink_on",
    "new_figure",
    "prefix",
    "save",
]

_DPI = 110
_TITLE = 12
_TEXT = 10
_BLACK = ("black", "k")


class _Picture(Figure):
    """A figure without a background, whose text and axes are in :data:`INK`.

    What matplotlib draws in black by default is coloured here when the figure is drawn, also in a
    notebook: its own settings for this are global, and those of the user.
    """

    def draw(self, renderer: RendererBase) -> None:
        self.patch.set_visible(False)
        for artist in self.findobj():
            match artist:
                case Axes():
                    artist.patch.set_visible(False)
                case Legend():
                    artist.set_frame_on(False)
                case Spine():
                    artist.set_edgecolor(INK)
                case Line2D() if artist.get_markeredgecolor() in _BLACK:
                    # The marks of an axis are markers of a line, with a colour of their own.
                    artist.set(color=INK, markeredgecolor=INK)
                case Text() | Line2D() if artist.get_color() in _BLACK:
                    artist.set_color(INK)
                case _:
                    pass
        super().draw(renderer)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, without a background. It does not use pyplot, so it
    needs no global state and no display."""
    return _Picture(figsize=(width, height), dpi=_DPI, layout="constrained")


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
    dark = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.3
    return "#FFFFFF" if dark else "#000000"


def prefix(title: str) -> str:
    """The text that stands before the title of a picture: `title` and a colon, or nothing."""
    return f"{title}: " if title else ""


def save(figure: Figure, path: Path) -> None:
    """Write a PNG. The same figure gives the same bytes."""
    figure.savefig(path, dpi=_DPI, format="png", metadata={"Software": None})
