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

from aprilsched.analysis import chart_model
from aprilsched.analysis.chart_model import (
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
from aprilsched.analysis.report.report_data import (
    MARKED,
    EngineTime,
    EpisodeLedger,
    PartTime,
    ReportData,
    Timeline,
)
from aprilsched.analysis.report.words import amount, nats, percent, seconds, signed_percent
from aprilsched.telemetry.engine_time import BUSY, PART_LABELS, Part
from aprilsched.telemetry.figures import DifferenceFigures, ForecastFigures
from aprilsched.telemetry.rollout_time import ROLLOUT_PART_LABELS

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


def losses(runs: Sequence[ReportData]) -> Chart:
    """Draw one bar for each run, divided into the parts of all engines' time."""
    chart = chart_model.time_by_part(
        {
            label(place, runs): {part.part: part.share for part in run.time.parts}
            for place, run in enumerate(runs)
        },
        x=Axis(label="share of the engines' time", unit="share", range=(0, 1)),
        written=percent,
        colours=PART_COLOURS,
        labels=PART_LABELS,
    )
    return replace(
        chart,
        id="losses",
        title=" ".join(_lost(place, runs) for place in range(len(runs))),
        note="All of the engines' time, by what it was spent on. Each slot of an engine counts for "
        "itself: an engine with half of its slots empty is half idle.",
        y=chart.y if len(runs) > 1 else replace(chart.y, ticks={}),
        height=72 + 56 * len(runs),
        legend=False,
    )


def rollout_time(runs: Sequence[ReportData]) -> Chart:
    """Draw one bar for each run with episodes, divided into what its rollouts were at from launch
    to delivery."""
    shown = [(place, run.episodes) for place, run in enumerate(runs) if run.episodes is not None]
    chart = chart_model.time_by_part(
        {label(place, runs): ledger.shares for place, ledger in shown},
        x=Axis(label="share of the rollouts' time", unit="share", range=(0, 1)),
        written=percent,
        colours=ROLLOUT_COLOURS,
        labels=ROLLOUT_PART_LABELS,
    )
    return replace(
        chart,
        id="rollout-time",
        title=" ".join(_lived(place, runs, ledger) for place, ledger in shown),
        note="All of the time of the delivered rollouts, from launch to delivery, by what they "
        "were at. While they use their tools their places at the engines are free for others.",
        y=chart.y if len(runs) > 1 else replace(chart.y, ticks={}),
        height=72 + 56 * len(shown),
    )


def _lived(place: int, runs: Sequence[ReportData], ledger: EpisodeLedger) -> str:
    return (
        f"{_who(place, runs)}A rollout takes {seconds(sum(ledger.seconds.values()))}, and is at "
        f"its tools for {percent(ledger.shares['tools'])} of that."
    )


def utilization(run: ReportData, end: float, prefix: str = "") -> Chart:
    """Draw all engines together over the run; the axis goes to `end`."""
    time = run.time
    tenths = [100 * share for share in _tenths(time)]
    few = time.batches <= MARKED
    chart = chart_model.parts_over_time(
        time.series, start=0.0, stops=time.stops, end=end, marks=time.deliveries if few else ()
    )
    if tenths:
        title = (
            f"Engines were busy for {percent(time.utilization)} of the time: between "
            f"{min(tenths):.0f} % and {max(tenths):.0f} % in the tenths of the run."
        )
    else:
        title = "Nothing ran."
    return replace(
        chart,
        id=f"utilization{prefix}",
        title=title,
        note="Blue is busy, every other colour a cause of idleness."
        + (
            " Dotted: a batch is delivered."
            if few
            else f" Each step is the mean of about {_per_step(time)} batches."
        ),
        of=run.name,
    )


def engine_timeline(run: ReportData, prefix: str = "") -> Chart:
    """Draw a few batches, with a row for each engine."""
    near = run.timeline
    return Chart(
        id=f"engines{prefix}",
        title=_engines_title(near, [engine.utilization for engine in near.engines]),
        note=f"{_shown(len(near.engines), near.engines_in_all, 'engines')}The shares of each "
        "engine's slots over time. Dotted: a batch is delivered.",
        series=[
            series
            for row, engine in enumerate(near.engines)
            for series in chart_model.areas(
                engine.series, start=near.start, stops=near.stops, row=row
            )
        ],
        x=Axis(label="seconds", range=(near.start, near.end)),
        y=Axis(label="", range=(0, 1), ticks={0: "0%", 1: "100%"}),
        rows=[f"{engine.name}: busy {percent(engine.utilization)}" for engine in near.engines],
        marks=near.deliveries,
        height=76 + _ROW * max(1, len(near.engines)),
        together=True,
        of=run.name,
    )


def responses(run: ReportData, prefix: str = "") -> Chart:
    """Draw a few batches: each response is a line, and its colour is the version that sampled
    it."""
    near = run.timeline
    chart = chart_model.responses(
        [bar.pieces for bar in near.responses],
        start=near.start,
        end=near.end,
        marks=near.deliveries,
        pauses=near.pauses,
    )
    mixed = sum(1 for bar in near.responses if len({v for _, _, v in bar.pieces}) > 1)
    return replace(
        chart,
        id=f"responses{prefix}",
        title=f"{percent(mixed / max(1, len(near.responses)))} of the responses in "
        f"{_batches(near)} were under way while the policy changed.",
        note=f"{_shown(len(near.responses), near.responses_in_all, 'responses')}Each line is a "
        "response, in order of launch, its colour the policy version that samples it. Grey: an "
        "engine stands still. Dotted: a batch is delivered.",
        of=run.name,
    )


def gpu(run: ReportData, end: float, prefix: str = "") -> Chart:
    """Draw the samples; the note is their own label."""
    means = [float(np.mean(line.percent)) for line in run.gpu]
    return Chart(
        id=f"gpu{prefix}",
        title=f"Samplers saw {np.mean(means):.0f} % on average, where the slots were "
        f"{percent(run.time.utilization)} busy.",
        note=run.gpu_label,
        series=[
            Series(
                name=line.name,
                x=line.times,
                y=np.asarray(line.percent) / 100,
                colour=PALETTE[i % len(PALETTE)],
                width=1.6,
                dash="solid" if i < len(PALETTE) else "dot",
                hover="%{y:.0%}",
            )
            for i, line in enumerate(run.gpu)
        ],
        x=Axis(label="seconds", range=(0, end)),
        y=Axis(label="share", unit="share", range=(0, 1.02)),
        height=260,
        together=True,
        of=run.name,
    )


# --- words ---------------------------------------------------------------------------------------


def label(place: int, runs: Sequence[ReportData]) -> str:
    """The name of a run, with A or B before it if there are two runs."""
    return f"{'AB'[place]}: {runs[place].name}" if len(runs) > 1 else runs[place].name


def _lost(place: int, runs: Sequence[ReportData]) -> str:
    run = runs[place]
    most, busy = lost_most(run.time), percent(run.time.utilization)
    who = _who(place, runs)
    if most is None:
        return (
            f"{who}Engines were busy for {busy} of their time, and no cause of idleness stands out."
        )
    return (
        f"{who}{percent(most.share)} of the engines' time {_LOST_TO[most.part]}; {busy} was busy."
    )


def _engines_title(near: Timeline, busy: Sequence[float]) -> str:
    if not busy:
        return "No engine took part."
    if len(busy) == 1:
        return f"In {_batches(near)} the engine was busy for {percent(busy[0])} of the time."
    return (
        f"In {_batches(near)} the busiest engine was used for {percent(max(busy))} of its time, "
        f"the idlest for {percent(min(busy))}."
    )


def _batches(near: Timeline) -> str:
    first, last = near.first_batch + 1, near.last_batch + 1
    return f"batch {first}" if first == last else f"batches {first} to {last}"


def _shown(shown: int, there: int, what: str) -> str:
    return "" if shown >= there else f"{shown:,} of {there:,} {what} are shown, evenly chosen. "


def _per_step(time: EngineTime) -> str:
    return f"{time.batches / max(1, len(time.stops)):.0f}"


def _tenths(time: EngineTime) -> list[float]:
    there = [np.array(time.series[part]) for part in BUSY if part in time.series]
    if not there:
        return []
    return [float(piece.mean()) for piece in np.array_split(sum(there), _TENTHS)]


# --- batch charts --------------------------------------------------------------------------------

# Draws the charts about batches: how long, how old and how biased their responses are.

_DRAWN = ("@muted", PALETTE[4])
_EQUAL = 0.01
"""A bias below this share of the mean length counts as none."""


def lengths(runs: Sequence[ReportData]) -> Chart:
    """Draw delivered lengths and the law that they are drawn from. Both axes are logarithmic."""
    curves: dict[str, tuple[chart_model.Curve, str, float]] = {}
    firsts: list[str] = []
    for place, run in enumerate(runs):
        firsts.append(f"{_who(place, runs)}of these, the first batch")
        for name, what, colour, width in (
            ("drawn", f"{_who(place, runs)}drawn (estimated)", _DRAWN[place], 5.0),
            ("delivered", f"{_who(place, runs)}delivered", OF_RUNS[place], 2.2),
            ("first", firsts[-1], OF_RUNS[place], 1.4),
        ):
            curve = run.lengths.get(name)
            if curve is not None:
                curves[what] = ((curve.lengths, curve.longer), colour, width)
    chart = chart_model.longer_than(curves, dotted=firsts)
    return replace(
        chart,
        id="lengths",
        title=" ".join(_law(place, runs) for place in range(len(runs))),
        note="The share of responses that are longer than a length; both axes are logarithmic. "
        "Drawn is what the policy would have produced: an estimate (Kaplan and Meier) that counts "
        "what never finished. Where delivered lies below drawn, long responses are missing.",
        x=_length_axis(runs, chart.x),
    )


def ages(runs: Sequence[ReportData]) -> Chart:
    """Draw the delivered tokens by staleness."""
    most = max((_last(run.staleness.tokens_by_age) for run in runs), default=0)
    names = _numbered(most, first=0, last=len(AGE_COLOURS) - 1)
    share = runs[0].headline("off_policy_token_share").value
    mean = runs[0].headline("staleness_mean").value or 0.0
    title = (
        f"{percent(share)} of the delivered tokens came from an older policy; on average a token "
        f"was {mean:.2f} versions old."
    )
    if len(runs) > 1:
        other = runs[1].headline("off_policy_token_share").value
        title = (
            f"{percent(share)} of A's tokens and {percent(other)} of B's came from an older policy."
        )
    return Chart(
        id="ages",
        title=title,
        note="Staleness: policy versions between the one that sampled a token and the one that "
        "trains on it. 0 is on-policy.",
        series=_grouped(runs, [run.staleness.tokens_by_age for run in runs], names),
        x=Axis(label="staleness, versions", categories=True),
        y=Axis(label="delivered tokens", unit="share", from_zero=True),
        legend=len(runs) > 1,
    )


def versions(runs: Sequence[ReportData]) -> Chart:
    """Draw the delivered responses by the number of versions that sampled them."""
    counts = [run.staleness.responses_by_versions for run in runs]
    names = _numbered(max(map(_last, counts), default=0), first=1, last=len(AGE_COLOURS))
    said = [
        f"{percent(sum(count[1:]))} of {_whose(i, runs)} responses"
        for i, count in enumerate(counts)
    ]
    return Chart(
        id="versions",
        title=f"{' and '.join(said)} were sampled by more than one policy version.",
        note="A response that is carried over an update goes on under new weights; each of its "
        "tokens knows its own version.",
        series=_grouped(runs, counts, names),
        x=Axis(label="versions that sampled the response", categories=True),
        y=Axis(label="delivered responses", unit="share", from_zero=True),
        legend=len(runs) > 1,
    )


def ages_by_batch(run: ReportData, prefix: str = "") -> Chart:
    """Draw the ages of each batch's tokens as stacked bars."""
    ledger = run.staleness
    stale = [100 * (1 - share) for share in ledger.by_batch[0]] if ledger.by_batch else []
    late = stale[-max(1, len(stale) // 4) :]
    title = "No batch was delivered."
    if stale:
        title = (
            f"The first batch is {stale[0]:.0f} % off-policy, the last quarter of them "
            f"{np.mean(late):.0f} %."
        )
    together = run.staleness.batches
    some = len(together) > 1 and together[1] - together[0] > 1
    chart = chart_model.ages_by_batch([batch + 1 for batch in together], ledger.by_batch)
    return replace(
        chart,
        id=f"batches{prefix}",
        title=title,
        note="Each bar is a batch, divided by the staleness of its tokens."
        if not some
        else "Each bar is some batches together, divided by the staleness of their tokens.",
        of=run.name,
    )


def bias(runs: Sequence[ReportData]) -> Chart:
    """Draw the length bias of everything delivered so far, by batch: as measured, and as the
    responses in flight predict it."""
    chart = chart_model.bias_over_batches(
        {_letter(place, runs): run.bias.transient for place, run in enumerate(runs)},
        colours=PALETTE if len(runs) == 1 else OF_RUNS,
        predicted=len(runs) == 1,
    )
    return replace(
        chart,
        id="bias",
        title=" ".join(_transient(place, runs) for place in range(len(runs))),
        note=f"The mean length of everything delivered so far, against {_mean(runs)}. "
        "Short responses finish first, so a run begins below 0; what is in flight brings it back. "
        "A gap that stays is a censor.",
        height=320,
    )


def distances(runs: Sequence[ReportData]) -> list[Chart]:
    """Draw the distance of each batch's lengths from the drawn law, with what is expected of a
    batch drawn at random. Older logs do not have it; there is no chart then."""
    series: list[Series] = []
    said: list[str] = []
    for place, run in enumerate(runs):
        own = run.bias.length_distance_by_batch
        usual = run.bias.iid_length_distance_by_batch
        pairs = [(a, b) for a, b in zip(own, usual, strict=True) if a is not None and b is not None]
        if not pairs:
            continue
        mean, expected = np.mean(pairs, axis=0)
        said.append(
            f"the lengths of {_whose(place, runs)} batches are {mean:.2f} off the drawn law on "
            f"average, where batches drawn at random would be {expected:.2f} off"
        )
        for name, values in (("batch", own), ("drawn at random", usual)):
            at = [i for i in evenly(len(values)).tolist() if values[i] is not None]
            series.append(
                Series(
                    name=f"{_who(place, runs)}{name}",
                    x=[i + 1 for i in at],
                    y=np.array([values[i] for i in at], dtype=np.float64),
                    colour=_colour(place, runs),
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


def forecasts(run: ReportData, who: str, prefix: str = "") -> Chart | None:
    """Draw the efficiency that automatic scheduling forecast for each batch beside what happened.
    There is no chart of a run without forecasts."""
    ledger = run.forecasts
    if ledger is None:
        return None
    outcomes = [figures.efficiency for figures in ledger.by_batch]
    known = [(n, e) for n, e in zip(ledger.batches, outcomes, strict=True) if e is not None]
    return Chart(
        id=f"forecasts{prefix}",
        title=_how_right(ledger.steady, who),
        note="The line is the forecast of the schedule in force, which changes with each choice of "
        "a schedule. A point is a batch. A forecast is for the mean of many batches, whose single "
        "ones scatter; where points lie below the line on average, it was too good.",
        series=[
            Series(
                name="forecast",
                x=[index + 1 for index in ledger.batches],
                y=[figures.efficiency_forecast for figures in ledger.by_batch],
                colour=PALETTE[0],
                step=True,
                told=[figures.schedule for figures in ledger.by_batch],
                hover="%{y:.1%}<br>%{customdata}",
            ),
            Series(
                kind="points",
                name="outcome",
                x=[index + 1 for index, _ in known],
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


def deciles(runs: Sequence[ReportData]) -> Chart:
    """Draw the mean staleness of ten classes of length."""
    found = [(place, run.bias.by_length_decile) for place, run in enumerate(runs)]
    known = [(place, figures) for place, figures in found if figures is not None]
    said = [
        f"the longest tenth of {_whose(place, runs)} responses is {long:.1f} versions old, the "
        f"shortest {short:.1f}"
        for place, figures in known
        for short, long in [(figures.staleness_mean[0], figures.staleness_mean[-1])]
    ]
    title = "; ".join(said) or "too few responses were delivered to tell"
    chart = chart_model.staleness_by_tenth(
        {label(place, runs): figures for place, figures in found},
        colours=[PALETTE[2]] if len(runs) == 1 else OF_RUNS,
    )
    return replace(
        chart,
        id="deciles",
        title=f"{title[0].upper()}{title[1:]}.",
        note="Delivered responses in ten classes of equal number by their length. Above: the "
        "share of their tokens that an older policy sampled.",
        height=320,
    )


# --- parts ---------------------------------------------------------------------------------------


def _grouped(
    runs: Sequence[ReportData], shares: Sequence[Sequence[float]], names: Sequence[str]
) -> list[Series]:
    return [
        Series(
            kind="bar",
            name=label(place, runs),
            x=names,
            y=share[: len(names)],
            colour=AGE_COLOURS[: len(names)] if len(runs) == 1 else OF_RUNS[place],
            texts=[percent(each) for each in share[: len(names)]],
            hover="%{x}: %{y:.1%}",
        )
        for place, share in enumerate(shares)
    ]


def _colour(place: int, runs: Sequence[ReportData]) -> str:
    return PALETTE[0] if len(runs) == 1 else OF_RUNS[place]


def _numbered(count: int, *, first: int, last: int) -> list[str]:
    """ "0", "1", …; the last of all classes has all that are larger."""
    return [f"{n} or more" if n == last else str(n) for n in range(first, first + count)]


def _last(shares: Sequence[float]) -> int:
    """The entries up to the last one that is not 0; at least one."""
    return max((i + 1 for i, share in enumerate(shares) if share), default=1)


def _length_axis(runs: Sequence[ReportData], axis: Axis) -> Axis:
    """The axis from the shortest response to the longest, with ticks at 1, 2, 5, 10, …"""
    curves = [curve for run in runs for curve in run.lengths.values() if len(curve.lengths) > 1]
    least = min((curve.lengths[1] for curve in curves), default=1.0)
    most = max((curve.lengths[-1] for curve in curves), default=10.0)
    ticks = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if 0.8 * least <= tick <= 1.2 * most]
    return replace(
        axis, range=(0.8 * least, 1.15 * most), ticks={tick: amount(tick) for tick in shown}
    )


# --- words ---------------------------------------------------------------------------------------


def _letter(place: int, runs: Sequence[ReportData]) -> str:
    return "AB"[place] if len(runs) > 1 else ""


def _who(place: int, runs: Sequence[ReportData]) -> str:
    return f"{'AB'[place]}: " if len(runs) > 1 else ""


def _whose(place: int, runs: Sequence[ReportData]) -> str:
    return "the" if len(runs) == 1 else f"{'AB'[place]}'s"


def _law(place: int, runs: Sequence[ReportData]) -> str:
    run = runs[place]
    who = _who(place, runs)
    drawn, delivered = run.lengths.get("drawn"), run.lengths.get("delivered")
    if drawn is None or delivered is None:
        return f"{who}Nothing was delivered, so there are no lengths to compare."
    off = delivered.mean / drawn.mean - 1
    means = f"mean {amount(delivered.mean)} against {amount(drawn.mean)} tokens"
    if abs(off) < _EQUAL:
        return f"{who}Delivered responses are as long as those drawn ({means})."
    longer = "longer" if off > 0 else "shorter"
    return f"{who}Delivered responses are {percent(abs(off))} {longer} than those drawn ({means})."


def _mean(runs: Sequence[ReportData]) -> str:
    found = [run.bias.transient for run in runs if run.bias.transient is not None]
    if len(found) != 1:
        return "the mean of its workload, or of what was drawn"
    what = "the workload's own mean" if found[0].reference == "workload_mean" else "the mean drawn"
    return f"{what} ({amount(found[0].mean)} tokens)"


def _transient(place: int, runs: Sequence[ReportData]) -> str:
    run = runs[place]
    who = _who(place, runs)
    found, censored = run.bias.transient, run.bias.censoring.policies
    if found is None:
        return f"{who}No batch was delivered, so there is no bias to speak of."
    off = signed_percent(found.measured)
    if censored:
        return f"{who}The length bias is {off}, and part of it stays: responses were dropped."
    if abs(found.measured) < _EQUAL:
        return f"{who}The length bias is {off}: what the trainer got is not too short."
    further = found.further_batches_to_1_percent
    if further == 0:
        return f"{who}The length bias is {off}, more than what is in flight explains."
    more = f"{further:,} more {'batch' if further == 1 else 'batches'}"
    return f"{who}The length bias is {off} so far; it is below 1 % after {more}."


# --- alignment charts ----------------------------------------------------------------------------

# Charts about how far the trainer's log-probabilities are from the engines'.
#
# All of them show k3, the mean of exp(d) - 1 - d over tokens, where d is the trainer's
# log-probability minus the engine's.

_MISMATCH = Axis(label="k3, nats", unit="nats", from_zero=True)
_SHOWN_ENGINES = 12


def by_staleness(runs: Sequence[ReportData]) -> Chart:
    """The mismatch, which is all there is at staleness 0, beside that of older tokens."""
    found = _reported(runs)
    rows = [run.alignment.by_age for _, run in found if run.alignment is not None]
    count = max((i + 1 for row in rows for i, each in enumerate(row) if each.tokens), default=1)
    names = [f"{age} or more" if age == len(rows[0]) - 1 else str(age) for age in range(count)]
    return Chart(
        id="alignment-age",
        title=" ".join(_finding(place, runs) for place, _ in found),
        note="At staleness 0 the engine and the trainer have the same weights, so this bar is the "
        "mismatch of two programs. The other bars contain it, together with what the policy has "
        "moved since. No bound on staleness makes the first bar smaller.",
        series=_bars(runs, rows, names),
        x=Axis(label="staleness, versions", categories=True),
        y=_MISMATCH,
        legend=len(runs) > 1,
    )


def by_position(runs: Sequence[ReportData]) -> Chart:
    """The mismatch along the response."""
    found = _reported(runs)
    rows = [run.alignment.by_position for _, run in found if run.alignment is not None]
    count = max(1, *map(len, rows))
    # Short names: rotated ones would stand on the axis' title.
    names = [f"{1 << i}" if i < 10 else f"{1 << (i - 10)}k" for i in range(count)]
    said = [
        f"{_whose_tokens(place, runs)} tokens differ most from position {1 << most:,} to "
        f"{(2 << most) - 1:,} of the response."
        for (place, _), row in zip(found, rows, strict=True)
        if any(each.k3 for each in row)
        for most in [max(range(len(row)), key=lambda i, row=row: row[i].k3 or 0.0)]
    ]
    return Chart(
        id="alignment-position",
        title=" ".join(said)
        or (
            "Engine and trainer agree at every position."
            if any(each.tokens for row in rows for each in row)
            else "No token of staleness 0 was compared."
        ),
        note="Tokens of staleness 0. Each bar begins at its position in the response, and ends "
        "where the next one begins. A mismatch that grows along the response points to positions "
        "or to the KV cache.",
        series=_bars(runs, rows, names),
        x=Axis(label="position in the response, from", categories=True),
        y=_MISMATCH,
        legend=len(runs) > 1,
    )


def by_engine(run: ReportData, prefix: str = "") -> Chart:
    """The mismatch of each engine, the largest first."""
    engines = run.alignment.by_engine if run.alignment is not None else {}
    ranked = sorted(engines.items(), key=lambda item: -(item[1].k3 or 0.0))
    shown = ranked[:_SHOWN_ENGINES]
    title = "No token of staleness 0 was compared."
    if len(ranked) == 1:
        title = f"{ranked[0][0]} differs by {nats(ranked[0][1].k3)}."
    elif ranked:
        (first, most), (last, least) = ranked[0], ranked[-1]
        title = f"{first} differs most, by {nats(most.k3)}; {last} least, by {nats(least.k3)}."
    fewer = f" The {len(shown)} largest of {len(ranked)}." if len(shown) < len(ranked) else ""
    return Chart(
        id=f"alignment-engine{prefix}",
        title=title,
        note="Tokens of staleness 0, by the engine that sampled them. An engine that stands out "
        f"may have other weights, other kernels or another card.{fewer}",
        series=[
            _bar([name for name, _ in shown], [each for _, each in shown], run.name, PALETTE[0])
        ],
        x=Axis(label="engine", categories=True),
        y=_MISMATCH,
        legend=False,
        of=run.name,
    )


# --- parts ---------------------------------------------------------------------------------------


def _reported(runs: Sequence[ReportData]) -> list[tuple[int, ReportData]]:
    return [(place, run) for place, run in enumerate(runs) if run.alignment is not None]


def _bars(
    runs: Sequence[ReportData], rows: Sequence[Sequence[DifferenceFigures]], names: Sequence[str]
) -> list[Series]:
    return [
        _bar(names, row[: len(names)], label(place, runs), _colour(place, runs))
        for (place, _), row in zip(_reported(runs), rows, strict=True)
    ]


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


# --- words ---------------------------------------------------------------------------------------


def _whose_tokens(place: int, runs: Sequence[ReportData]) -> str:
    return "The" if len(runs) == 1 else f"{'AB'[place]}'s"


def _finding(place: int, runs: Sequence[ReportData]) -> str:
    found = runs[place].alignment
    who = _who(place, runs)
    if found is None or found.whole.k3 is None:
        return f"{who}No token of staleness 0 was compared."
    return (
        f"{who}With the same weights, engine and trainer differ by {nats(found.whole.k3)}, and "
        f"{percent(found.whole.beyond_share)} of the tokens by more than {found.bound:g} nats."
    )
