"""The style of pictures: one palette that colour-blind people can distinguish, one set of sizes,
and no background, so that a picture can be read on a light page and on a dark one.

:func:`new_figure` creates every picture of the project, including the experiments.
"""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context  # pyright: ignore[reportUnknownVariableType]
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.spines import Spine
from matplotlib.text import Text

from aprilsched.errors import ConfigError
from aprilsched.observe.report.chart_model import GREY, INK, PALETTE

__all__ = ["GREY", "INK", "PALETTE", "finish", "new_figure", "picture_format", "save"]

_CHANGING = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}
"""The formats of pictures, with the metadata that would differ between two writes."""
_DPI = 110
_TEXT = 10
_BLACK = ("black", "k", INK)


class _Picture(Figure):
    """A figure without a background, whose text and axes are in :data:`INK`; black in a PDF, which
    has a white page and embeds its fonts as TrueType, as publishers require. An SVG contains text.

    Elements that matplotlib draws in black by default are coloured when the figure is drawn, even
    in a notebook. matplotlib's settings are not used, because they are global and belong to the
    user.
    """

    _ink = INK

    def savefig(self, *args: Any, **settings: Any) -> None:
        name = settings.get("format") or (args[0] if args else settings.get("fname"))
        self._ink = "black" if str(name).lower().endswith("pdf") else INK
        # The salt makes the ids in an SVG reproducible.
        with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "aprilsched"}):
            super().savefig(*args, **settings)

    def draw(self, renderer: RendererBase) -> None:
        self.patch.set_visible(False)
        for artist in self.findobj():
            match artist:
                case Axes():
                    artist.patch.set_visible(False)
                case Legend():
                    artist.set_frame_on(False)
                case Spine():
                    artist.set_edgecolor(self._ink)
                case Line2D() if artist.get_markeredgecolor() in _BLACK:
                    # Axis ticks are markers of a line, with a separate colour.
                    artist.set(color=self._ink, markeredgecolor=self._ink)
                case Text() | Line2D() if artist.get_color() in _BLACK:
                    artist.set_color(self._ink)
                case _:
                    pass
        super().draw(renderer)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size in inches, without a background. It does not use pyplot,
    so it needs neither global state nor a display."""
    return _Picture(figsize=(width, height), dpi=_DPI, layout="constrained")


def finish(axes: Axes, *, title: str, x: str, y: str, pad: float = 8, size: float = _TEXT) -> None:
    """Set the title and labels, and a frame without the upper and right line. The labels have
    `size` points, and the title a fifth more."""
    axes.set_title(title, fontsize=1.2 * size, loc="left", pad=pad)
    axes.set_xlabel(x, fontsize=size)
    axes.set_ylabel(y, fontsize=size)
    axes.tick_params(labelsize=size)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a picture in the format of its suffix. Figures that are made alike have the same
    bytes.

    Raises:
        ConfigError: if the suffix names an unknown format, or the file cannot be written.
    """
    name = picture_format(path)
    try:
        figure.savefig(path, dpi=_DPI, format=name, metadata={_CHANGING[name]: None})
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}).") from None


def picture_format(path: Path) -> str:
    """Return the format of a picture by its suffix: png, svg or pdf.

    Raises:
        ConfigError: if the suffix names an unknown format.
    """
    name = path.suffix.lower().removeprefix(".")
    if name not in _CHANGING:
        raise ConfigError(f"A picture must end in .{', .'.join(_CHANGING)}, got {path}.")
    return name
