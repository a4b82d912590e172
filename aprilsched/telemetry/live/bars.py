"""Bars and sparklines of characters.

Invariant: what is drawn is exactly as wide as asked, and tells its parts apart without colours too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["ASCII", "BLOCKS", "Glyphs", "bar", "divided", "sparkline"]

_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Glyphs:
    """Attributes:
    full, empty: of a bar.
    heights: of a sparkline, from nothing to all.
    fills: of the parts of a divided bar, in their order.
    dot: between figures of a line.
    """

    full: str
    empty: str
    heights: str
    fills: str
    dot: str


BLOCKS = Glyphs(full="━", empty="─", heights=" ▁▂▃▄▅▆▇█", fills="█▓▒░▚▞·▪", dot=" · ")
ASCII = Glyphs(full="#", empty="-", heights=" .:-=+*#@", fills="#%+~=/.o", dot=", ")
"""For terminals whose encoding has no others."""


def bar(share: float, width: int, glyphs: Glyphs) -> tuple[str, str]:
    """The full part and the empty part; a share above 1 is all of it."""
    filled = round(min(1.0, max(0.0, share)) * width)
    return glyphs.full * filled, glyphs.empty * (width - filled)


def divided(counts: Mapping[_Key, int], width: int) -> dict[_Key, int]:
    """Cells of a bar for each count, in proportion; together `width`, and none that counts has
    less than one while there is room."""
    present = {key: count for key, count in counts.items() if count > 0}
    if not present or width < len(present):
        return {}
    total = sum(present.values())
    exact = {key: count / total * width for key, count in present.items()}
    cells = {key: max(1, int(share)) for key, share in exact.items()}
    while (off := width - sum(cells.values())) != 0:
        # The part that is furthest from its share, and can spare a cell if one is to go.
        able = [key for key in cells if off > 0 or cells[key] > 1]
        key = max(able, key=lambda key: (exact[key] - cells[key]) * off)
        cells[key] += 1 if off > 0 else -1
    return cells


def sparkline(shares: Sequence[float], glyphs: Glyphs) -> str:
    """A column for each share of 1; one above nothing is seen."""
    steps = len(glyphs.heights) - 1
    return "".join(
        glyphs.heights[min(steps, max(share > 0, round(share * steps)))] for share in shares
    )
