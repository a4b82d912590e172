"""Tests bars and sparklines: exact width, proportions, and no visible part is lost."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from aprilsched.telemetry.live.view import (
    ASCII,
    BLOCKS,
    bar,
    clock_time,
    divided,
    percent,
    plural,
    sparkline,
    thousands,
)


def test_a_bar_is_full_in_proportion():
    assert bar(0.5, 10, ASCII) == ("#####", "-----")
    assert bar(0.0, 4, ASCII) == ("", "----")
    assert bar(1.7, 4, ASCII) == ("####", "")
    assert bar(0.3, 0, ASCII) == ("", "")


def test_a_divided_bar_shows_every_part():
    assert divided({"a": 60, "b": 30, "c": 10}, 10) == {"a": 6, "b": 3, "c": 1}
    assert divided({"a": 4000, "b": 1, "c": 0}, 20) == {"a": 19, "b": 1}
    assert divided({}, 20) == {}
    assert divided({"a": 1, "b": 1}, 1) == {}


@given(some.lists(some.integers(1, 10**6), min_size=1, max_size=8), some.integers(8, 200))
def test_a_divided_bar_is_as_wide_as_asked(counts: list[int], width: int):
    cells = divided(dict(enumerate(counts)), width)
    assert sum(cells.values()) == width
    assert len(cells) == len(counts)
    order = sorted(range(len(counts)), key=lambda part: counts[part])
    assert all(cells[a] <= cells[b] + 1 for a, b in pairwise(order))


def test_a_sparkline_has_a_column_for_each_share():
    assert sparkline([0.0, 0.5, 1.0], BLOCKS) == " ▄█"
    assert sparkline([0.001, 2.0], BLOCKS) == "▁█"
    assert sparkline([0.0, 0.5, 1.0], ASCII) == " =@"


def test_glyphs_tell_parts_apart_without_colours():
    for glyphs in (BLOCKS, ASCII):
        assert len(set(glyphs.fills)) == len(glyphs.fills) == 8
        assert glyphs.full != glyphs.empty
        assert len(set(glyphs.heights)) == len(glyphs.heights)
    assert all(text.isascii() for text in (ASCII.fills, ASCII.heights, ASCII.dot))


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (clock_time(0.9), "0:00"),
        (clock_time(61), "1:01"),
        (clock_time(3_599.9), "59:59"),
        (clock_time(3_600), "1:00:00"),
        (clock_time(90_061), "25:01:01"),
        (percent(0.0), "0%"),
        (percent(0.004), "<1%"),
        (percent(0.124), "12%"),
        (thousands(0), "0"),
        (thousands(9_999), "9,999"),
        (thousands(9_999.6), "10k"),
        (thousands(152_310), "152k"),
        (thousands(999_600), "1.0M"),
        (plural(1, "engine"), "1 engine"),
        (plural(2_000, "engine"), "2,000 engines"),
    ],
)
def test_words(said: str, wanted: str):
    assert said == wanted
