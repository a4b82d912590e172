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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprilsched.observe.figures.bias_collector import sample_law
from aprilsched.observe.figures.engine_time import BUSY, PART_INDEX, PART_LABELS, Part
from aprilsched.observe.figures.figures import AlignmentFigures, DifferenceFigures, ForecastFigures
from aprilsched.observe.figures.rollout_time import ROLLOUT_PART_LABELS
from aprilsched.observe.log.run import bars, lengths_of, tokens_by_class
from aprilsched.observe.log.usage import busy_share
from aprilsched.observe.report import chart_model
from aprilsched.observe.report.chart_model import (
    AGE_COLOURS,
    OF_RUNS,
    PALETTE,
    PART_COLOURS,
    ROLLOUT_COLOURS,
    Axis,
    Chart,
    Series,
    Values,
    evenly,
    ink_on,
)
from aprilsched.observe.report.report_data import EngineTime, PartTime, RunReport
from aprilsched.observe.report.words import amount, nats, percent, seconds, signed_percent

Spec = dict[str, Any]

_FORMATS = {"share": "~%", "whole": "d", "tokens": ",.0f", "nats": ".2~e"}
"""The d3 format of each unit."""


def spec(chart: Chart) -> Spec:
    """The chart as plotly draws it."""
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


def _rows(chart: Chart) -> Spec:
    """Axes above each other, each with its name."""
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
    if series.told:
        found["customdata"] = [text(each) for each in series.told]
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
                "cliponaxis": False,
            }
            if chart.stacked and isinstance(colour, str) and colour.startswith("#"):
                # plotly's own is grey, which cannot be read on olive.
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
    """Vertical lines over the whole range of the axes."""
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
    """Escape text, so that plotly shows it literally."""
    return html.escape(content, quote=False)


def numbers(values: Sequence[float] | np.ndarray[Any, Any]) -> Spec:
    """A typed array of float32; None and NaN are gaps."""
    array = np.asarray(values, dtype="<f4")
    return {"dtype": "f4", "bdata": base64.b64encode(array.tobytes()).decode()}


# --- time charts ---------------------------------------------------------------------------------

# Draws the charts about time: where it went, when, and on which engine.

_BINS = 240
_MARKED = 20
"""Largest number of batches whose ends can be distinguished in a chart of the whole run."""
_SHOWN_BATCHES = 5
_SHOWN_ENGINES = 12
_SHOWN_RESPONSES = 240
_SHOWN_PAUSES = 200
_ROW = 64
_TENTHS = 10
_SMALL = 0.02

_LOST_TO: dict[Part, str] = {
    "re_prefill": "was lost to recomputing contexts",
    "tail": "was lost to the tail of batches",
    "pause": "was lost to pauses",
    "refit": "was lost while new weights were loaded",
    "trainer": "was lost waiting for the trainer",
    "prompts": "was lost waiting for prompts",
    "rewards": "was lost waiting for rewards",
    "environment": "was lost waiting for the tools or scores of episodes",
    "asleep": "was spent asleep, with the memory released for the trainer",
    "lost": "was lost because engines were out of use",
}


def lost_most(time: EngineTime) -> PartTime | None:
    """The largest part in which engines did nothing useful; None if no part is large enough to
    mention."""
    idle = [part for part in time.parts if part.part not in BUSY]
    most = max(idle, key=lambda part: part.share, default=None)
    return most if most is not None and most.share >= _SMALL else None


def losses(runs: Sequence[RunReport]) -> Chart:
    """Draw one bar for each run, divided into the parts of all engines' time."""
    chart = chart_model.time_by_part(
        {run.label: {part.part: part.share for part in run.figures.time.parts} for run in runs},
        x=Axis(label="share of the engines' time", unit="share", range=(0, 1)),
        written=percent,
        colours=PART_COLOURS,
        labels=PART_LABELS,
    )
    return replace(
        chart,
        id="losses",
        title=" ".join(map(_lost, runs)),
        note="All of the engines' time, by what it was spent on. Each slot of an engine counts for "
        "itself: an engine with half of its slots empty is half idle.",
        y=chart.y if len(runs) > 1 else replace(chart.y, ticks={}),
        height=72 + 56 * len(runs),
        legend=False,
    )


def _lost(run: RunReport) -> str:
    time = run.figures.time
    most, busy = lost_most(time), percent(time.utilization)
    if most is None:
        return (
            f"{run.who}Engines were busy for {busy} of their time, and no cause of idleness stands "
            "out."
        )
    return (
        f"{run.who}{percent(most.share)} of the engines' time {_LOST_TO[most.part]}; {busy} was "
        "busy."
    )


def rollout_time(runs: Sequence[RunReport]) -> Chart:
    """Draw one bar for each run with episodes, divided into what its rollouts were at from launch
    to delivery."""
    shown = [run for run in runs if run.episodes]
    spent = [run.summary.rollout_seconds for run in shown]
    wholes = [sum(each.values()) or 1.0 for each in spent]
    shares = [
        {part: found / whole for part, found in each.items()}
        for each, whole in zip(spent, wholes, strict=True)
    ]
    chart = chart_model.time_by_part(
        {run.label: found for run, found in zip(shown, shares, strict=True)},
        x=Axis(label="share of the rollouts' time", unit="share", range=(0, 1)),
        written=percent,
        colours=ROLLOUT_COLOURS,
        labels=ROLLOUT_PART_LABELS,
    )
    said = [
        f"{run.who}A rollout takes {seconds(whole)}, and is at its tools for "
        f"{percent(found['tools'])} of that."
        for run, whole, found in zip(shown, wholes, shares, strict=True)
    ]
    return replace(
        chart,
        id="rollout-time",
        title=" ".join(said),
        note="All of the time of the delivered rollouts, from launch to delivery, by what they "
        "were at. While they use their tools their places at the engines are free for others.",
        y=chart.y if len(runs) > 1 else replace(chart.y, ticks={}),
        height=72 + 56 * len(shown),
    )


def utilization(run: RunReport, end: float) -> Chart:
    """Draw all engines together over the run; the axis goes to `end`."""
    usage, batches = run.usage, len(run.run.deliveries)
    few = batches <= _MARKED
    # Pieces that are about as long as a batch would show the phase of the batch in which they
    # begin.
    bins = _BINS if few else min(_BINS // 2, max(_MARKED, batches // 2))
    shares = _shares(usage.series(bins).sum(axis=1))
    busy = np.sum([shares.get(part, np.zeros(bins)) for part in BUSY], axis=0)
    tenths = [100 * float(piece.mean()) for piece in np.array_split(busy, _TENTHS)]
    title = "Nothing ran."
    if any(tenths):
        title = (
            f"Engines were busy for {percent(usage.utilization)} of the time: between "
            f"{min(tenths):.0f} % and {max(tenths):.0f} % in the tenths of the run."
        )
    chart = chart_model.parts_over_time(
        shares,
        start=0.0,
        stops=_stops(0.0, usage.wall, bins),
        end=end,
        marks=_delivered_at(run) if few else (),
    )
    return replace(
        chart,
        id=f"utilization{run.suffix}",
        title=title,
        note="Blue is busy, every other colour a cause of idleness."
        + (
            " Dotted: a batch is delivered."
            if few
            else f" Each step is the mean of about {batches / bins:.0f} batches."
        ),
        of=run.figures.name,
    )


def engine_timeline(run: RunReport) -> Chart:
    """Draw a few batches, with a row for each engine."""
    near, usage = _Near(run), run.usage
    count = len(usage.engines)
    shown = list(range(count))
    if count > _SHOWN_ENGINES:
        shown = [i * count // _SHOWN_ENGINES for i in range(_SHOWN_ENGINES)]
    spent = usage.series(_BINS, start=near.start, end=near.end)
    stops = _stops(near.start, near.end, _BINS)
    busy = [busy_share(spent[:, index]) for index in shown]
    title = "No engine took part."
    if len(busy) == 1:
        title = f"In {near.batches} the engine was busy for {percent(busy[0])} of the time."
    elif busy:
        title = (
            f"In {near.batches} the busiest engine was used for {percent(max(busy))} of its time, "
            f"the idlest for {percent(min(busy))}."
        )
    return Chart(
        id=f"engines{run.suffix}",
        title=title,
        note=f"{_shown(len(shown), count, 'engines')}The shares of each "
        "engine's slots over time. Dotted: a batch is delivered.",
        series=[
            series
            for row, index in enumerate(shown)
            for series in chart_model.areas(
                _shares(spent[:, index]), start=near.start, stops=stops, row=row
            )
        ],
        x=Axis(label="seconds", range=(near.start, near.end)),
        y=Axis(label="", range=(0, 1), ticks={0: "0%", 1: "100%"}),
        rows=[
            f"{usage.engines[index]}: busy {percent(share)}"
            for index, share in zip(shown, busy, strict=True)
        ],
        marks=near.marks,
        height=76 + _ROW * max(1, len(shown)),
        together=True,
        of=run.figures.name,
    )


def responses(run: RunReport) -> Chart:
    """Draw a few batches: each response is a line, and its colour is the version that sampled
    it."""
    near = _Near(run)
    start, end = near.start, near.end
    shown = bars(run.run, end, at_most=_SHOWN_RESPONSES, start=start)
    there = {a.rollout_id for a in run.run.attempts if a.start < end and a.end > start}
    chart = chart_model.responses(
        shown, start=start, end=end, marks=near.marks, pauses=_pauses(run, start, end)
    )
    mixed = sum(1 for bar in shown if len({version for _, _, version in bar}) > 1)
    return replace(
        chart,
        id=f"responses{run.suffix}",
        title=f"{percent(mixed / max(1, len(shown)))} of the responses in "
        f"{near.batches} were under way while the policy changed.",
        note=f"{_shown(len(shown), len(there), 'responses')}Each line is a "
        "response, in order of launch, its colour the policy version that samples it. Grey: an "
        "engine is paused. Dotted: a batch is delivered.",
        of=run.figures.name,
    )


def gpu(run: RunReport, end: float) -> Chart:
    """Draw the samples; the note is their own label."""
    mean = np.mean([share.mean() for _, share in run.gpu.values()])
    return Chart(
        id=f"gpu{run.suffix}",
        title=f"Samplers saw {100 * mean:.0f} % on average, where the slots were "
        f"{percent(run.usage.utilization)} busy.",
        note=run.gpu_label,
        series=[
            Series(
                name=name,
                x=times,
                y=share,
                colour=PALETTE[i % len(PALETTE)],
                width=1.6,
                dash="solid" if i < len(PALETTE) else "dot",
                hover="%{y:.0%}",
            )
            for i, (name, (times, share)) in enumerate(run.gpu.items())
        ],
        x=Axis(label="seconds", range=(0, end)),
        y=Axis(label="share", unit="share", range=(0, 1.02)),
        height=260,
        together=True,
        of=run.figures.name,
    )


class _Near:
    """A few batches of a run from near: those after the burn-in, if there are enough.

    Attributes:
        marks: times of their deliveries.
        batches: the batches in words.
    """

    def __init__(self, run: RunReport) -> None:
        times = _delivered_at(run)
        burn_in = run.summary.steady_state.burn_in
        first = max(0, min(burn_in, len(times) - _SHOWN_BATCHES))
        self.marks = times[first : first + _SHOWN_BATCHES]
        last = first + max(1, len(self.marks))
        self.start = times[first - 1] if first else 0.0
        self.end = self.marks[-1] if self.marks else run.run.end
        one = last == first + 1
        self.batches = f"batch {last}" if one else f"batches {first + 1} to {last}"


def _pauses(run: RunReport, start: float, end: float) -> list[tuple[float, float]]:
    """Join the times in which some engine was paused, if they meet."""
    met: list[tuple[float, float]] = []
    for pause in sorted(run.run.pauses, key=lambda pause: pause.start):
        if pause.end < start or pause.start > end:
            continue
        if met and pause.start <= met[-1][1]:
            met[-1] = (met[-1][0], max(met[-1][1], pause.end))
        elif len(met) < _SHOWN_PAUSES:
            met.append((pause.start, pause.end))
    return met


def _delivered_at(run: RunReport) -> list[float]:
    return [delivery.time for delivery in run.run.deliveries]


def _stops(start: float, end: float, bins: int) -> list[float]:
    return np.linspace(start, end, bins + 1)[1:].tolist()


def _shares(seconds: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """The share of each part that occurs, in each bin, from float64 [bins, parts]."""
    totals = seconds.sum(axis=1, keepdims=True)
    shares = np.divide(seconds, totals, out=np.zeros_like(seconds), where=totals > 0)
    return {part: shares[:, index] for part, index in PART_INDEX.items() if shares[:, index].any()}


def _shown(shown: int, there: int, what: str) -> str:
    return "" if shown >= there else f"{shown:,} of {there:,} {what} are shown, evenly chosen. "


# --- batch charts --------------------------------------------------------------------------------

# Draws the charts about batches: how long, how old and how biased their responses are.

_EQUAL = 0.01
"""A bias below this share of the mean length counts as none."""
_BATCH_BARS = 60
_SHOWN_FORECASTS = 400


def lengths(runs: Sequence[RunReport]) -> Chart:
    """Draw delivered lengths and the law that they are drawn from. Both axes are logarithmic."""
    first = "of these, the first batch"
    curves: dict[str, tuple[chart_model.Curve, str, float]] = {}
    for run in runs:
        bias, colour = run.summary.bias, _colour(run, PALETTE[5])
        muted = PALETTE[4] if run.letter == "B" else "@muted"
        for what, law, drawn_in, width in (
            ("drawn (estimated)", bias.drawn, muted, 5.0),
            ("delivered", bias.delivered, colour, 2.2),
            (first, sample_law(lengths_of(run.run.deliveries[:1])), colour, 1.4),
        ):
            if law is not None:
                curves[f"{run.who}{what}"] = (law.lengths, law.longer), drawn_in, width
    chart = chart_model.longer_than(curves, dotted=[f"{run.who}{first}" for run in runs])
    return replace(
        chart,
        id="lengths",
        title=" ".join(map(_law, runs)),
        note="The share of responses that are longer than a length; both axes are logarithmic. "
        "Drawn is what the policy would have produced: an estimate (Kaplan and Meier) that counts "
        "what never finished. Where delivered lies below drawn, long responses are missing.",
        x=_length_axis(chart),
    )


def _law(run: RunReport) -> str:
    drawn, delivered = run.summary.bias.drawn, run.summary.bias.delivered
    if drawn is None or delivered is None:
        return f"{run.who}Nothing was delivered, so there are no lengths to compare."
    off = delivered.mean / drawn.mean - 1
    means = f"mean {amount(delivered.mean)} against {amount(drawn.mean)} tokens"
    if abs(off) < _EQUAL:
        return f"{run.who}Delivered responses are as long as those drawn ({means})."
    longer = "longer" if off > 0 else "shorter"
    return (
        f"{run.who}Delivered responses are {percent(abs(off))} {longer} than those drawn ({means})."
    )


def _length_axis(chart: Chart) -> Axis:
    """The axis from the shortest response to the longest, with ticks at 1, 2, 5, 10, …"""
    curves = [series.x for series in chart.series if len(series.x) > 1]
    least = min((float(curve[1]) for curve in curves), default=1.0)
    most = max((float(curve[-1]) for curve in curves), default=10.0)
    ticks = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if 0.8 * least <= tick <= 1.2 * most]
    return replace(
        chart.x, range=(0.8 * least, 1.15 * most), ticks={tick: amount(tick) for tick in shown}
    )


def ages_by_batch(run: RunReport) -> Chart:
    """Draw the ages of each batch's tokens as stacked bars."""
    tokens = tokens_by_class(run.run, len(AGE_COLOURS))
    pieces = np.array_split(np.arange(len(tokens)), max(1, min(_BATCH_BARS, len(tokens))))
    together = [piece for piece in pieces if piece.size]
    sums = np.array([tokens[piece].sum(axis=0) for piece in together]).reshape(-1, len(AGE_COLOURS))
    shares = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
    title = "No batch was delivered."
    if together:
        stale = 100 * (1 - shares[:, 0])
        late = stale[-max(1, len(stale) // 4) :]
        title = (
            f"The first batch is {stale[0]:.0f} % off-policy, the last quarter of them "
            f"{np.mean(late):.0f} %."
        )
    chart = chart_model.ages_by_batch([int(piece[0]) + 1 for piece in together], shares.T.tolist())
    return replace(
        chart,
        id=f"batches{run.suffix}",
        title=title,
        note="Each bar is a batch, divided by the staleness of its tokens: policy versions between "
        "the one that sampled a token and the one that trains on it."
        if all(piece.size == 1 for piece in together)
        else "Each bar is some batches together, divided by the staleness of their tokens: policy "
        "versions between the one that sampled a token and the one that trains on it.",
        of=run.figures.name,
    )


def bias(runs: Sequence[RunReport]) -> Chart:
    """Draw the length bias of everything delivered so far, by batch: as measured, and as the
    responses in flight predict it."""
    chart = chart_model.bias_over_batches(
        {run.letter: run.summary.bias.transient for run in runs},
        colours=[_colour(run) for run in runs],
        predicted=len(runs) == 1,
    )
    found = [transient for run in runs if (transient := run.summary.bias.transient)]
    mean = "the mean of its workload, or of what was drawn"
    if len(found) == 1:
        known = found[0].reference == "workload_mean"
        mean = "the workload's own mean" if known else "the mean drawn"
        mean += f" ({amount(found[0].mean)} tokens)"
    return replace(
        chart,
        id="bias",
        title=" ".join(map(_transient, runs)),
        note=f"The mean length of everything delivered so far, against {mean}. "
        "Short responses finish first, so a run begins below 0; what is in flight brings it back. "
        "A gap that stays is a censor.",
        height=320,
    )


def _transient(run: RunReport) -> str:
    found, censored = run.summary.bias.transient, run.summary.bias.censoring.policies
    if found is None:
        return f"{run.who}No batch was delivered, so there is no bias to speak of."
    off = f"{run.who}The length bias is {signed_percent(found.measured)}"
    if censored:
        return f"{off}, and part of it stays: responses were dropped."
    if abs(found.measured) < _EQUAL:
        return f"{off}: what the trainer got is not too short."
    further = found.further_batches_to_1_percent
    if further == 0:
        return f"{off}, more than what is in flight explains."
    more = f"{further:,} more {'batch' if further == 1 else 'batches'}"
    return f"{off} so far; it is below 1 % after {more}."


def distances(runs: Sequence[RunReport]) -> list[Chart]:
    """Draw the distance of each batch's lengths from the drawn law, with what is expected of a
    batch drawn at random. There is no chart if no batch has it."""
    series: list[Series] = []
    said: list[str] = []
    for run in runs:
        batches = run.summary.per_batch
        own = [batch.length_distance for batch in batches]
        usual = [batch.iid_length_distance for batch in batches]
        pairs = [(a, b) for a, b in zip(own, usual, strict=True) if a is not None and b is not None]
        if not pairs:
            continue
        mean, expected = np.mean(pairs, axis=0)
        said.append(
            f"the lengths of {run.whose} batches are {mean:.2f} off the drawn law on "
            f"average, where batches drawn at random would be {expected:.2f} off"
        )
        for name, values in (("batch", own), ("drawn at random", usual)):
            at = [i for i in evenly(len(values)).tolist() if values[i] is not None]
            series.append(
                Series(
                    name=f"{run.who}{name}",
                    x=[i + 1 for i in at],
                    y=np.array([values[i] for i in at], dtype=np.float64),
                    colour=_colour(run),
                    dash="solid" if values is own else "dash",
                    hover="%{y:.3f}",
                )
            )
    if not said:
        return []
    title = "; ".join(said)
    chart = Chart(
        id="distances",
        title=f"{title[0].upper()}{title[1:]}.",
        note="Kolmogorov's distance: the largest difference between the shares of responses up to "
        "a length, in the batch and in the law that all lengths are drawn from (estimated when the "
        "batch was delivered). Batches that are all short or all long are far from it.",
        series=series,
        x=Axis(label="batch", unit="whole"),
        y=Axis(label="distance from the drawn law", from_zero=True),
        together=True,
    )
    return [chart]


def forecasts(run: RunReport) -> Chart | None:
    """Draw the efficiency that automatic scheduling forecast for each batch beside what happened.
    There is no chart of a run without forecasts."""
    found = [(each.index + 1, each.forecast) for each in run.summary.per_batch if each.forecast]
    if not found:
        return None
    places: list[int] = evenly(len(found), _SHOWN_FORECASTS).tolist()
    shown = [found[place] for place in places]
    known = [(number, f.efficiency) for number, f in shown if f.efficiency is not None]
    return Chart(
        id=f"forecasts{run.suffix}",
        title=_how_right(run.summary.steady_state.forecast, run.whose),
        note="The line is the forecast of the schedule in force, which changes with each choice of "
        "a schedule. A point is a batch. A forecast is for the mean of many batches, whose single "
        "ones scatter; where points lie below the line on average, it was too good.",
        series=[
            Series(
                name="forecast",
                x=[number for number, _ in shown],
                y=[figures.efficiency_forecast for _, figures in shown],
                colour=PALETTE[0],
                step=True,
                told=[figures.schedule for _, figures in shown],
                hover="%{y:.1%}<br>%{customdata}",
            ),
            Series(
                kind="points",
                name="outcome",
                x=[number for number, _ in known],
                y=[efficiency for _, efficiency in known],
                colour=PALETTE[5],
                hover="%{y:.1%}",
            ),
        ],
        x=Axis(label="batch", unit="whole"),
        y=Axis(label="T_bound / time", unit="share", from_zero=True),
        together=True,
    )


def _how_right(steady: ForecastFigures | None, who: str) -> str:
    if steady is None or steady.efficiency is None:
        return "No batch after the burn-in had a forecast."
    off = steady.efficiency / steady.efficiency_forecast - 1
    return (
        f"{percent(steady.efficiency_forecast)} of the bound were forecast for {who} batches after "
        f"the burn-in, and {percent(steady.efficiency)} came: {signed_percent(off)}."
    )


def deciles(runs: Sequence[RunReport]) -> Chart:
    """Draw the mean staleness of ten classes of length."""
    found = {run: run.summary.bias.by_length_decile for run in runs}
    said = [
        f"the longest tenth of {run.whose} responses is {figures.staleness_mean[-1]:.1f} versions "
        f"old, the shortest {figures.staleness_mean[0]:.1f}"
        for run, figures in found.items()
        if figures is not None
    ]
    title = "; ".join(said) or "too few responses were delivered to tell"
    chart = chart_model.staleness_by_tenth(
        {run.label: figures for run, figures in found.items()},
        colours=[_colour(run, PALETTE[2]) for run in runs],
    )
    return replace(
        chart,
        id="deciles",
        title=f"{title[0].upper()}{title[1:]}.",
        note="Delivered responses in ten classes of equal number by their length. Above: the "
        "share of their tokens that an older policy sampled.",
        height=320,
    )


def _colour(run: RunReport, alone: str = PALETTE[0]) -> str:
    """The colour of one of two runs, or of one that is `alone`."""
    return OF_RUNS["AB".index(run.letter)] if run.letter else alone


# --- alignment charts ----------------------------------------------------------------------------

# Charts about how far the trainer's log-probabilities are from the engines'.
#
# All of them show k3, the mean of exp(d) - 1 - d over tokens, where d is the trainer's
# log-probability minus the engine's. The runs are those whose trainer reported.

_MISMATCH = Axis(label="k3, nats", unit="nats", from_zero=True)


def by_staleness(runs: Sequence[RunReport]) -> Chart:
    """The mismatch, which is all there is at staleness 0, beside that of older tokens."""
    rows = {run: found.by_age for run, found in _reported(runs).items()}
    count = max(
        (i + 1 for row in rows.values() for i, each in enumerate(row) if each.tokens), default=1
    )
    last = min(len(row) for row in rows.values()) - 1
    names = [f"{age} or more" if age == last else str(age) for age in range(count)]
    return Chart(
        id="alignment-age",
        title=" ".join(_finding(run, found) for run, found in _reported(runs).items()),
        note="At staleness 0 the engine and the trainer have the same weights, so this bar is the "
        "mismatch of two programs. The other bars contain it, together with what the policy has "
        "moved since. No bound on staleness makes the first bar smaller.",
        series=_bars(rows, names),
        x=Axis(label="staleness, versions", categories=True),
        y=_MISMATCH,
        legend=len(runs) > 1,
    )


def _finding(run: RunReport, found: AlignmentFigures) -> str:
    if found.whole.k3 is None:
        return f"{run.who}No token of staleness 0 was compared."
    return (
        f"{run.who}With the same weights, engine and trainer differ by {nats(found.whole.k3)}, and "
        f"{percent(found.whole.beyond_share)} of the tokens by more than {found.bound:g} nats."
    )


def by_position(runs: Sequence[RunReport]) -> Chart:
    """The mismatch along the response."""
    rows = {run: found.by_position for run, found in _reported(runs).items()}
    count = max(1, *map(len, rows.values()))
    # Short names: rotated ones would stand on the axis' title.
    names = [f"{1 << i}" if i < 10 else f"{1 << (i - 10)}k" for i in range(count)]
    said: list[str] = []
    for run, row in rows.items():
        mismatch = [each.k3 or 0.0 for each in row]
        if any(mismatch):
            most = mismatch.index(max(mismatch))
            said.append(
                f"{run.whose.capitalize()} tokens differ most from position {1 << most:,} to "
                f"{(2 << most) - 1:,} of the response."
            )
    if not said:
        compared = any(each.tokens for row in rows.values() for each in row)
        said.append(
            "Engine and trainer agree at every position."
            if compared
            else "No token of staleness 0 was compared."
        )
    return Chart(
        id="alignment-position",
        title=" ".join(said),
        note="Tokens of staleness 0. Each bar begins at its position in the response, and ends "
        "where the next one begins. A mismatch that grows along the response points to positions "
        "or to the KV cache.",
        series=_bars(rows, names),
        x=Axis(label="position in the response, from", categories=True),
        y=_MISMATCH,
        legend=len(runs) > 1,
    )


def by_engine(run: RunReport, found: AlignmentFigures) -> Chart:
    """The mismatch of each engine, the largest first."""
    ranked = sorted(found.by_engine.items(), key=lambda item: -(item[1].k3 or 0.0))
    shown = ranked[:_SHOWN_ENGINES]
    title = "No token of staleness 0 was compared."
    if len(ranked) == 1:
        title = f"{ranked[0][0]} differs by {nats(ranked[0][1].k3)}."
    elif ranked:
        (first, most), (last, least) = ranked[0], ranked[-1]
        title = f"{first} differs most, by {nats(most.k3)}; {last} least, by {nats(least.k3)}."
    fewer = f" The {len(shown)} largest of {len(ranked)}." if len(shown) < len(ranked) else ""
    name = run.figures.name
    return Chart(
        id=f"alignment-engine{run.suffix}",
        title=title,
        note="Tokens of staleness 0, by the engine that sampled them. An engine that stands out "
        f"may have other weights, other kernels or another card.{fewer}",
        series=[_bar([name for name, _ in shown], [each for _, each in shown], name, PALETTE[0])],
        x=Axis(label="engine", categories=True),
        y=_MISMATCH,
        legend=False,
        of=name,
    )


def _reported(runs: Sequence[RunReport]) -> dict[RunReport, AlignmentFigures]:
    """What the trainers of these runs reported, where they did."""
    return {run: found for run in runs if (found := run.summary.alignment) is not None}


def _bars(
    rows: Mapping[RunReport, Sequence[DifferenceFigures]], names: Sequence[str]
) -> list[Series]:
    return [_bar(names, row[: len(names)], run.label, _colour(run)) for run, row in rows.items()]


def _bar(names: Sequence[str], row: Sequence[DifferenceFigures], name: str, colour: str) -> Series:
    return Series(
        kind="bar",
        name=name,
        x=names[: len(row)],
        y=[float("nan") if each.k3 is None else each.k3 for each in row],
        colour=colour,
        told=[
            f"{each.tokens:,} tokens, {percent(each.beyond_share)} of them beyond the bound"
            for each in row
        ],
        hover="%{y:.2~g} nats; %{customdata}",
    )
