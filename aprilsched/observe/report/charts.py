"""Makes the charts of a report, each with its finding in words, and draws them as plotly's own
JSON: data and layout, without plotly's Python objects.

The page inserts the colours of roles ("@name") and changes them with its theme. Numbers are typed
arrays, which a browser reads without parsing. Text is escaped, because plotly interprets some HTML
in it.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprilsched.observe.report.chart_model import Axis, Chart, Series, Values, ink_on

Spec = dict[str, Any]

_FORMATS = {"share": "~%", "whole": "d", "tokens": ",.0f", "nats": ".2~e"}
"""The d3 format of each unit."""


def spec(chart: Chart) -> Spec:
    """Return the chart as plotly draws it."""
    layout: Spec = {
        "xaxis": _axis(chart.x, fixedrange=chart.across or chart.x.categories),
        "yaxis": _axis(chart.y, fixedrange=True),
        "hovermode": "x unified" if chart.together else "closest",
        "barmode": "stack" if chart.stacked else "group",
        "bargap": 0.2,
        "uniformtext": {"mode": "hide", "minsize": 10},
        "shapes": [
            {
                "type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": stop, "y0": 0,
                "y1": 1, "fillcolor": "@band", "line": {"width": 0}, "layer": "below",
            }
            for start, stop in chart.pauses
        ],
    }  # fmt: skip
    if chart.across:
        layout["yaxis"] |= {"autorange": "reversed", "automargin": True}
    if chart.level is not None:
        layout["yaxis"]["zeroline"] = True
    if chart.x.unit == "whole":
        # A zoom between two ticks would show none.
        layout["xaxis"]["fixedrange"] = True
        layout["xaxis"]["dtick"] = _whole_step([series.x for series in chart.series])
    if chart.rows:
        layout |= _rows(chart)
    data = [_trace(series, chart) for series in chart.series]
    if chart.marks:
        data += [_marks(chart, row) for row in range(max(1, len(chart.rows)))]
    return {"id": chart.id, "title": chart.title, "data": data, "layout": layout}


def _axis(of: Axis, **more: Any) -> Spec:
    found: Spec = {"title": {"text": text(of.label)}, **more}
    if of.log:
        found["type"] = "log"
        if of.unit == "share":
            found["dtick"] = 1
    if of.range is not None:
        found["range"] = [math.log10(end) if of.log else end for end in of.range]
    if of.categories:
        found |= {"type": "category", "tickangle": 0}
    if of.from_zero:
        found["rangemode"] = "tozero"
    if of.ticks is not None:
        found |= {"tickvals": list(of.ticks), "ticktext": list(of.ticks.values())}
        found["showticklabels"] = bool(of.ticks)
    elif of.unit:
        found["tickformat"] = _FORMATS[of.unit]
    return found


def _whole_step(values: Sequence[Values]) -> int:
    """Return a step of 1, 2, 5, 10, … between ticks, so that there are at most nine."""
    ends = [float(end) for each in values if len(each) for end in (each[0], each[-1])]
    span = max(ends, default=0.0) - min(ends, default=0.0)
    return next(d * 10**p for p in range(16) for d in (1, 2, 5) if span <= 8 * d * 10**p)


def _rows(chart: Chart) -> Spec:
    """Return axes above each other, each with its name."""
    height = 1 / len(chart.rows)
    upper = [1 - (row + 0.34) * height for row in range(len(chart.rows))]
    axes = {
        f"yaxis{_place(row)}": {
            **_axis(replace(chart.y, label=""), fixedrange=True),
            "domain": [1 - (row + 1) * height, top],
        }
        for row, top in enumerate(upper)
    }
    names = [
        {
            "text": text(name), "x": 0, "xref": "paper", "xanchor": "left", "y": top,
            "yref": "paper", "yanchor": "bottom", "showarrow": False,
            "font": {"size": 12, "color": "@ink"},
        }
        for name, top in zip(chart.rows, upper, strict=True)
    ]  # fmt: skip
    below = f"y{_place(len(chart.rows) - 1)}"
    return {**axes, "xaxis": _axis(chart.x, anchor=below), "annotations": names}


def _place(row: int) -> str:
    return str(row + 1) if row else ""


def _trace(series: Series, chart: Chart) -> Spec:
    x, y = _values(series.x), _values(series.y)
    found: Spec = {"name": text(series.name), "yaxis": f"y{_place(series.row)}"}
    found |= {"x": y, "y": x} if chart.across else {"x": x, "y": y}
    found |= {"hovertemplate": series.hover} if series.hover else {"hoverinfo": "name"}
    if series.hover_text:
        found["customdata"] = [text(each) for each in series.hover_text]
    colour = series.colour if isinstance(series.colour, str) else list(series.colour)
    match series.kind:
        case "bar":
            width = 1 if chart.across else 0
            found |= {
                "type": "bar",
                "orientation": "h" if chart.across else "v",
                "marker": {"color": colour, "line": {"color": "@paper", "width": width}},
                "text": list(series.texts),
                "textposition": "inside" if chart.stacked else "outside",
                "insidetextanchor": "middle",
                "textangle": 0,
                # Without it a text may be above its bar. plotly hides those of bars whose float32
                # end is beyond the axis, so stacked bars have it.
                "cliponaxis": chart.stacked,
            }
            if chart.stacked and isinstance(colour, str) and colour.startswith("#"):
                # plotly's default is grey, which is unreadable on olive.
                found["insidetextfont"] = {"color": ink_on(colour)}
        case "area":
            found |= {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": f"parts{_place(series.row)}",
                "line": {"width": 0, "shape": "hv"},
                "fillcolor": colour,
            }
        case "points":
            found |= {"type": "scatter", "mode": "markers", "marker": {"size": 6, "color": colour}}
        case "line":
            shape = "hv" if series.step else "linear"
            line = {"width": series.width, "color": colour, "dash": series.dash, "shape": shape}
            found |= {"type": "scatter", "mode": "lines", "line": line}
    return found


def _values(values: Values) -> Any:
    array = np.asarray(values)
    return [text(str(each)) for each in array] if array.dtype.kind == "U" else numbers(array)


def _marks(chart: Chart, row: int) -> Spec:
    """Return vertical lines over the whole range of the axes."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": numbers(np.repeat(np.asarray(chart.marks, dtype=np.float64), 3)),
        "y": numbers(np.tile([0.0, max(chart.y.range or (1.0,)), np.nan], len(chart.marks))),
        "line": {"width": 1.2, "color": "@ink", "dash": "dot"},
        "name": "batch delivered",
        "hoverinfo": "skip",
        "yaxis": f"y{_place(row)}",
    }


def text(content: str) -> str:
    """Escape text, so that plotly shows it literally; backticks become quotes."""
    return html.escape(content.replace("`", "'"), quote=False)


def numbers(values: Sequence[float] | np.ndarray[Any, Any]) -> Spec:
    """Return a typed array of float32; None and NaN are gaps."""
    array = np.asarray(values, dtype="<f4")
    return {"dtype": "f4", "bdata": base64.b64encode(array.tobytes()).decode()}
