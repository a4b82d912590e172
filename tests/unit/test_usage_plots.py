"""Tests that the pictures of the engines' time show all of it, on light and on dark pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread
from matplotlib.patches import Rectangle

from aprilsched.observe.log.usage import RunUsage, usage_of
from aprilsched.observe.plots import TimeUnit, save, where_time_goes
from aprilsched.observe.report.style import finish, new_figure

DATA = Path(__file__).resolve().parents[2] / "notebooks" / "data"


@pytest.fixture(scope="module")
def usages() -> dict[str, RunUsage]:
    return {name: usage_of(DATA / name) for name in ("sync", "april")}


def ends(axes: Axes) -> list[float]:
    """The end of each bar, from the uppermost on: the sum of its pieces."""
    pieces = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    rows = sorted({round(piece.get_y(), 6) for piece in pieces})
    return [sum(p.get_width() for p in pieces if round(p.get_y(), 6) == row) for row in rows]


@pytest.mark.parametrize("unit", ["share", "gpu_minutes_per_million"])
def test_the_pieces_of_a_bar_add_up(usages: dict[str, RunUsage], unit: TimeUnit):
    (axes,) = where_time_goes(usages, unit=unit).axes
    wholes = {
        "share": [1.0 for _ in usages],
        "gpu_minutes_per_million": [
            8 * usage.wall / 60 / sum(usage.tokens) * 1e6 for usage in usages.values()
        ],
    }
    assert np.allclose(ends(axes), wholes[unit], rtol=1e-9)


def test_a_picture_has_no_background_and_nothing_black(tmp_path: Path):
    figure = new_figure(4, 3)
    figure.suptitle("a title")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="#D55E00", label="a line")
    axes.axvline(0.5, color="black")
    axes.annotate("a note", (0.1, 0.8))
    axes.legend(title="a legend", frameon=True)
    finish(axes, title="axes", x="x", y="y")
    save(figure, tmp_path / "it.png")
    pixels = imread(tmp_path / "it.png")
    seen = pixels[pixels[..., 3] > 0.5]
    assert 0 < len(seen) < 0.2 * pixels[..., 3].size
    assert seen[:, :3].max() < 0.9
    assert seen[:, :3].max(axis=1).min() > 0.4
