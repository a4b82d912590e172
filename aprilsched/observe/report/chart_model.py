"""The model of a chart: its data, axes, units, texts and colours.

The report draws it with :func:`aprilsched.observe.report.charts.spec`, as plotly's JSON; the
notebooks draw it with matplotlib. Shares are between 0 and 1, and renderers write them as
percentages. A colour that depends on the theme is a role, written as "@name" after the page's CSS
variables (--name).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from aprilsched.observe.figures.engine_time import Part
from aprilsched.observe.figures.rollout_time import RolloutPart

PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
"""Okabe and Ito, 2008: the eight-colour set without black."""
GREY = "#808080"
INK = "#767676"
"""The colour of text and axes. It can be read on white (contrast 4.5) and on near-black (4.1)."""

PART_COLOURS: dict[Part, str] = {
    "decode": "#0072B2",
    "prefill": "#56B4E9",
    "re_prefill": "#CC79A7",
    "tail": "#E69F00",
    "pause": "#D55E00",
    "refit": "#F0E442",
    "trainer": "#BBBBBB",
    "prompts": "#882255",
    "rewards": "#009E73",
    "environment": "#999933",
    "asleep": "#DDDDDD",
    "lost": "#6B6B6B",
}
"""Busy parts are blue, and parts that no schedule can avoid are grey. The others have colours of
Okabe and Ito, and two of Tol."""

ROLLOUT_COLOURS: dict[RolloutPart, str] = {
    "engine": "#0072B2",
    "paused": "#D55E00",
    "queue": "#CC79A7",
    "tools": "#999933",
    "agent": "#DDDDDD",
    "score": "#009E73",
    "batch": "#E69F00",
}
"""Colours of the parts of a rollout's time; parts shared with engines have the same colour."""

STALENESS_COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00")
"""Colours of tokens by their staleness, 0 versions first. The last one is for all older tokens."""


def ink_on(colour: str) -> str:
    """Return black or white, whichever is more readable on `colour`, such as ``#0072B2`` (by
    luminance, as in WCAG)."""
    red, green, blue = [(part / 255) ** 2.2 for part in bytes.fromhex(colour[1:])]
    dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.3
    return "#FFFFFF" if dark else "#000000"


Values = Sequence[float] | Sequence[str] | NDArray[Any]
Unit = Literal["", "share", "whole", "tokens", "nats"]
"""Number format of an axis: unchanged, as percentages, whole numbers only, with thousands
separators, or for very small numbers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Series:
    """One line, area or set of bars or points; `y` has one value for each of `x`.

    Attributes:
        colour: the colour, or one for each bar.
        step: whether a line keeps each value until the next one, as areas do.
        texts: labels inside stacked bars, or above other bars.
        hover: plotly template of the hover text of a value; "" shows only the name.
        hover_text: additional data of each value for `hover`, as plotly's customdata.
        row: index of its axes among the stacked ones, from 0.
    """

    name: str
    x: Values
    y: Values
    colour: str | Sequence[str]
    kind: Literal["line", "area", "bar", "points"] = "line"
    width: float = 2.2
    dash: Literal["solid", "dash", "dot"] = "solid"
    step: bool = False
    texts: Sequence[str] = ()
    hover: str = ""
    hover_text: Sequence[str] = ()
    row: int = 0

    @property
    def css(self) -> str:
        """The colour of its entry in a legend, as CSS."""
        colour = self.colour if isinstance(self.colour, str) else self.colour[0]
        return f"var(--{colour[1:]})" if colour.startswith("@") else colour


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis.

    Attributes:
        range: the values at its ends; None derives them from the data.
        from_zero: whether the second axis starts at 0.
        ticks: labels by value, instead of the numbers; no ticks if empty.
    """

    label: str
    unit: Unit = ""
    range: tuple[float, float] | None = None
    log: bool = False
    categories: bool = False
    from_zero: bool = False
    ticks: Mapping[float, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart; in a page it also has its finding in words.

    Attributes:
        title: the finding.
        note: how to read the chart.
        of: name of the run that it is about; empty if it is about all runs.
        across: whether bars lie, with their names at the left.
        rows: names of axes above each other that share the first axis; none for a single one.
        marks: times of vertical lines.
        pauses: times (start, end) that are grey.
        level: value of a horizontal line.
        together: whether the page shows the values of all series at one place.
    """

    series: Sequence[Series]
    x: Axis
    y: Axis
    id: str = ""
    title: str = ""
    note: str = ""
    of: str = ""
    height: int = 300
    stacked: bool = False
    across: bool = False
    rows: Sequence[str] = ()
    marks: Sequence[float] = ()
    pauses: Sequence[tuple[float, float]] = ()
    level: float | None = None
    together: bool = False
    legend: bool = True

    @property
    def keys(self) -> list[Series]:
        """One series for each entry of the legend."""
        return list({series.name: series for series in self.series}.values() if self.legend else ())
