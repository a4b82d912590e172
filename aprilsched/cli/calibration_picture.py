"""The picture of a calibration: what was measured beside what the model says, and its errors."""

# matplotlib's own signatures end in untyped **kwargs.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from aprilsched.errors import ConfigError
from aprilsched.timing import Windows, predicted_seconds
from aprilsched.timing.model import StepTimeModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

_LIMIT = 40.0
"""Percent; errors beyond are drawn at the edge."""


def draw(model: StepTimeModel, windows: Windows, path: Path) -> None:
    """Write a PNG.

    Raises:
        ConfigError: if matplotlib is missing or the file cannot be written.
    """
    try:
        from aprilsched.analysis.style import finish, new_figure, save
    except ImportError:
        raise ConfigError("No picture without matplotlib; install 'aprilsched[plots]'.") from None
    figure = new_figure(12, 4.6)
    left, middle, right = figure.subplots(1, 3)
    _steps(left, model, windows)
    finish(left, title="Decode step", x="predicted, ms", y="measured, ms")
    _errors(middle, model, windows, windows.running)
    finish(middle, title="Error by batch", x="running requests", y="predicted / measured - 1, %")
    _errors(right, model, windows, windows.kv)
    finish(right, title="Error by context", x="context tokens", y="predicted / measured - 1, %")
    try:
        save(figure, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}).") from None


def _steps(axes: Axes, model: StepTimeModel, windows: Windows) -> None:
    from aprilsched.analysis.style import GREY, PALETTE

    steady = windows.where(windows.steady)
    predicted = 1e3 * predicted_seconds(model, steady) / steady.steps
    axes.scatter(predicted, 1e3 * steady.seconds / steady.steps, s=6, color=PALETTE[0])
    top = float(predicted.max())
    axes.plot([0, top], [0, top], color=GREY, linewidth=1)
    axes.set_xlim(0, 1.05 * top)
    axes.set_ylim(0, 1.3 * top)


def _errors(axes: Axes, model: StepTimeModel, windows: Windows, x: np.ndarray) -> None:
    from aprilsched.analysis.style import GREY, PALETTE

    error = 100 * (predicted_seconds(model, windows) / windows.seconds - 1)
    error = np.clip(error, -_LIMIT, _LIMIT)
    kinds = (("decoding", windows.steady), ("with prefill", windows.stalled))
    for (name, chosen), color in zip(kinds, PALETTE, strict=False):
        axes.scatter(x[chosen], error[chosen], s=6, color=color, label=name)
    axes.axhline(0, color=GREY, linewidth=1)
    axes.set_xscale("log")
    axes.set_ylim(-_LIMIT, _LIMIT)
    axes.legend(frameon=False, fontsize=9)
