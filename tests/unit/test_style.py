"""Tests that pictures can be read on light and on dark pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from aprilsched.errors import ConfigError
from aprilsched.observe.report.style import INK, finish, new_figure, save
from tests.support.table import each_row


def luminance(colour: str) -> float:
    """As WCAG defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


@each_row("page", ["#FFFFFF", "#131416", "#0D1117"])
def test_ink_can_be_read_on_light_and_dark_pages(page: str):
    dark, light = sorted((luminance(INK), luminance(page)))
    assert (light + 0.05) / (dark + 0.05) > 4


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


@each_row(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("PDF", b"%PDF")])
def test_a_picture_has_the_format_of_its_suffix(suffix: str, start: bytes, tmp_path: Path):
    for name in ("one", "two"):
        figure = new_figure(4, 3)
        figure.subplots().plot([0, 1], [0, 1])
        save(figure, tmp_path / f"{name}.{suffix}")
    first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
    assert first.startswith(start)
    assert first == second


def test_a_picture_of_another_format_is_refused(tmp_path: Path):
    for name, words in (
        ("it.jpg", r"end in \.png, \.svg, \.pdf"),
        ("no/it.png", "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=words):
            save(new_figure(4, 3), tmp_path / name)
