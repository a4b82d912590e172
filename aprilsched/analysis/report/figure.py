"""Makes charts as plotly's own JSON: data and layout, without plotly's Python objects.

Colours that depend on the theme are written as "@name", after the page's CSS variables (--name).
The page inserts the colours and changes them with its theme. Numbers are typed arrays, which a
browser reads without parsing. Text is escaped, because plotly interprets some HTML in it.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aprilsched.analysis.colours import PART_COLOURS, PART_LABELS
from aprilsched.telemetry.engine_time import PARTS, Part

__all__ = [
    "Chart",
    "Key",
    "Spec",
    "areas",
    "axis",
    "marks",
    "note_on",
    "numbers",
    "part_keys",
    "text",
]

Spec = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """An entry of a chart's legend."""

    label: str
    colour: str
    line: bool = False
    dashed: bool = False

    @property
    def css(self) -> str:
        """The colour as CSS."""
        return f"var(--{self.colour[1:]})" if self.colour.startswith("@") else self.colour


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart, with its finding in words."""

    id: str
    title: str
    """The finding, as the title of the chart."""
    note: str
    """How to read the chart."""
    data: list[Spec]
    layout: Spec
    height: int
    keys: list[Key] = field(default_factory=list[Key])
    of: str = ""
    """Name of the run that it is about; empty if it is about all runs."""


def text(content: str) -> str:
    """Escape text, so that plotly shows it literally."""
    return html.escape(content, quote=False)


def numbers(values: Sequence[float] | np.ndarray[Any, Any]) -> Spec:
    """A typed array of float32; None and NaN are gaps."""
    array = np.asarray(values, dtype="<f4")
    return {"dtype": "f4", "bdata": base64.b64encode(array.tobytes()).decode()}


def axis(title: str, **more: Any) -> Spec:
    """An axis with a title."""
    return {"title": {"text": text(title)}, **more}


def areas(
    series: Mapping[str, Sequence[float]],
    *,
    start: float,
    stops: Sequence[float],
    place: str = "",
    scale: float = 100.0,
) -> list[Spec]:
    """Shares of time as stacked areas, by part; `place` is the number of the axes."""
    edges = numbers([start, *stops])
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": f"parts{place}",
            "x": edges,
            "y": numbers(scale * np.append(series[part], series[part][-1:])),
            "line": {"width": 0, "shape": "hv"},
            "fillcolor": PART_COLOURS[part],
            "name": PART_LABELS[part],
            "hovertemplate": "%{y:.1f} %",
            "yaxis": f"y{place}",
        }
        for part in PARTS
        if part in series
    ]


def marks(times: Sequence[float], top: float, *, name: str, place: str = "") -> Spec:
    """Vertical lines from 0 to `top`."""
    x = np.repeat(np.asarray(times, dtype=np.float64), 3)
    y = np.tile([0.0, top, np.nan], len(times))
    return {
        "type": "scatter",
        "mode": "lines",
        "x": numbers(x),
        "y": numbers(y),
        "line": {"width": 1.2, "color": "@ink", "dash": "dot"},
        "name": name,
        "hoverinfo": "skip",
        "yaxis": f"y{place}",
    }


def note_on(content: str, *, y: float) -> Spec:
    """A line of text above axes whose upper edge is at `y` of the chart."""
    return {
        "text": text(content),
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": y,
        "yref": "paper",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 12, "color": "@ink"},
    }


def part_keys(parts: Sequence[Part]) -> list[Key]:
    """The legend of parts."""
    return [Key(label=PART_LABELS[part], colour=PART_COLOURS[part]) for part in parts]
