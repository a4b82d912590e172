"""Tests that the pictures of the engines' time show all of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from aprilsched.analysis.plots import where_time_goes
from aprilsched.analysis.plots.usage_parts import TimeUnit
from aprilsched.analysis.usage import RunUsage, usage_of

DATA = Path(__file__).resolve().parents[2] / "notebooks" / "data"


@pytest.fixture(scope="module")
def usages() -> dict[str, RunUsage]:
    return {name: usage_of(DATA / name) for name in ("sync", "april")}


def ends(axes: Axes) -> list[float]:
    """The end of each bar, from the uppermost on: the sum of its pieces."""
    pieces = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    rows = sorted({round(piece.get_y(), 6) for piece in pieces})
    return [sum(p.get_width() for p in pieces if round(p.get_y(), 6) == row) for row in rows]


@pytest.mark.parametrize("unit", ["share", "seconds", "gpu_minutes", "gpu_minutes_per_million"])
def test_the_pieces_of_a_bar_add_up(usages: dict[str, RunUsage], unit: TimeUnit):
    (axes,) = where_time_goes(usages, unit=unit).axes
    wholes = {
        "share": [1.0 for _ in usages],
        "seconds": [usage.wall for usage in usages.values()],
        "gpu_minutes": [8 * usage.wall / 60 for usage in usages.values()],
        "gpu_minutes_per_million": [
            8 * usage.wall / 60 / sum(usage.tokens) * 1e6 for usage in usages.values()
        ],
    }
    assert np.allclose(ends(axes), wholes[unit], rtol=1e-9)
