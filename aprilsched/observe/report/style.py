"""The style of pictures: one palette that colour-blind people can distinguish, one set of sizes,
and no background, so that a picture can be read on a light page and on a dark one.

:func:`new_figure` creates every picture of the project, including the experiments.
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.spines import Spine
from matplotlib.text import Text

from aprilsched.observe.report.chart_model import GREY, INK, PALETTE

__all__ = ["GREY", "INK", "PALETTE", "finish", "new_figure", "save"]

_DPI = 110
_TITLE = 12
_TEXT = 10
_BLACK = ("black", "k")


class _Picture(Figure):
    """A figure without a background, whose text and axes are in :data:`INK`.

    Elements that matplotlib draws in black by default are coloured when the figure is drawn, even
    in a notebook. matplotlib's settings are not used, because they are global and belong to the
    user.
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
                    # Axis ticks are markers of a line, with a separate colour.
                    artist.set(color=INK, markeredgecolor=INK)
                case Text() | Line2D() if artist.get_color() in _BLACK:
                    artist.set_color(INK)
                case _:
                    pass
        super().draw(renderer)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, without a background. It does not use pyplot,
    so it needs neither global state nor a display."""
    return _Picture(figsize=(width, height), dpi=_DPI, layout="constrained")


def finish(axes: Axes, *, title: str, x: str, y: str, pad: float = 8) -> None:
    """Set the title and labels, and a frame without the upper and right line."""
    axes.set_title(title, fontsize=_TITLE, loc="left", pad=pad)
    axes.set_xlabel(x, fontsize=_TEXT)
    axes.set_ylabel(y, fontsize=_TEXT)
    axes.tick_params(labelsize=_TEXT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG. The same figure produces the same bytes."""
    figure.savefig(path, dpi=_DPI, format="png", metadata={"Software": None})
