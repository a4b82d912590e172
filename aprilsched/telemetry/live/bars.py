"""Draws bars and sparklines with characters.

Invariant: the result is exactly as wide as requested, and its parts can be told apart without
colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["ASCII", "BLOCKS", "Glyphs", "bar", "divided", "sparkline"]

_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Glyphs:
    """The characters that bars and sparklines are drawn with.

    Attributes:
        full, empty: the two parts of a bar.
        heights: columns of a sparkline, from empty to full.
        fills: the parts of a divided bar, in order.
        dot: separates the figures of a line.
    """

    full: str
    empty: str
    heights: str
    fills: str
    dot: str


BLOCKS = Glyphs(full="━", empty="─", heights=" ▁▂▃▄▅▆▇█", fills="█▓▒░▚▞·▪", dot=" · ")
ASCII = Glyphs(full="#", empty="-", heights=" .:-=+*#@", fills="#%+~=/.o", dot=", ")
"""Characters for terminals whose encoding has no others."""


def bar(share: float, width: int, glyphs: Glyphs) -> tuple[str, str]:
    """The full and the empty part of a bar. A share above 1 is drawn as 1."""
    filled = round(min(1.0, max(0.0, share)) * width)
    return glyphs.full * filled, glyphs.empty * (width - filled)


def divided(counts: Mapping[_Key, int], width: int) -> dict[_Key, int]:
    """Number of cells for each count, in proportion to the counts; together they are `width`. As
    long as there is room, each count that is not 0 has at least one cell."""
    present = {key: count for key, count in counts.items() if count > 0}
    if not present or width < len(present):
        return {}
    total = sum(present.values())
    exact = {key: count / total * width for key, count in present.items()}
    cells = {key: max(1, int(share)) for key, share in exact.items()}
    while (off := width - sum(cells.values())) != 0:
        # Add a cell to the part that lacks the most, or take one from the part that has the largest
        # surplus and more than one cell.
        able = [key for key in cells if off > 0 or cells[key] > 1]
        key = max(able, key=lambda key: (exact[key] - cells[key]) * off)
        cells[key] += 1 if off > 0 else -1
    return cells


def sparkline(shares: Sequence[float], glyphs: Glyphs) -> str:
    """A column for each share, from 0 to 1. Any share above 0 can be seen."""
    steps = len(glyphs.heights) - 1
    return "".join(
        glyphs.heights[min(steps, max(share > 0, round(share * steps)))] for share in shares
    )
