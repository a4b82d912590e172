"""Makes charts as plotly's own JSON: data and layout, without plotly's Python objects.

Colours that depend on the theme are written as "@name", after the page's CSS variables (--name).
The page inserts the colours and changes them with its theme. Numbers are typed arrays, which a
browser reads without parsing. Text is escaped, because plotly interprets some HTML in it.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aprilsched.analysis.colours import AGE_COLOURS, PALETTE, PART_COLOURS, PART_LABELS
from aprilsched.analysis.report.report_data import (
    MARKED,
    EngineTime,
    LengthCurve,
    PartTime,
    ReportData,
    Timeline,
)
from aprilsched.analysis.report.words import amount, nats, percent, signed_percent
from aprilsched.telemetry.engine_time import BUSY, PARTS, Part
from aprilsched.telemetry.figures import DifferenceFigures, ForecastFigures

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
    "environment": "was lost waiting for the tools of episodes",
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
    there: list[Part] = [part for part in PARTS if any(_share(run, part) > 0 for run in runs)]
    names = [text(label(place, runs)) for place in range(len(runs))]
    data: list[Spec] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": numbers([100 * _share(run, part) for run in runs]),
            "name": key.label,
            "marker": {"color": key.colour, "line": {"color": "@paper", "width": 1}},
            "text": [percent(_share(run, part)) for run in runs],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "hovertemplate": f"{text(key.label)}: %{{x:.1f}} %<extra></extra>",
        }
        for part, key in zip(there, part_keys(there), strict=True)
    ]
    layout: Spec = {
        "barmode": "stack",
        "bargap": 0.25,
        "xaxis": axis("share of the engines' time, %", range=[0, 100], fixedrange=True),
        "yaxis": {
            "autorange": "reversed", "fixedrange": True, "showticklabels": len(runs) > 1,
            "automargin": True,
        },
        "uniformtext": {"mode": "hide", "minsize": 10},
    }  # fmt: skip
    return Chart(
        id="losses",
        title=" ".join(_lost(place, runs) for place in range(len(runs))),
        note="All of the engines' time, by what it was spent on. Each slot of an engine counts for "
        "itself: an engine with half of its slots empty is half idle.",
        data=data,
        layout=layout,
        height=72 + 56 * len(runs),
    )


def utilization(run: ReportData, end: float, prefix: str = "") -> Chart:
    """Draw all engines together over the run; the axis goes to `end`."""
    time = run.time
    tenths = [100 * share for share in _tenths(time)]
    data = areas(time.series, start=0.0, stops=time.stops)
    few = time.batches <= MARKED
    if few and time.deliveries:
        data.append(marks(time.deliveries, 100, name="batch delivered"))
    if tenths:
        title = (
            f"Engines were busy for {percent(time.utilization)} of the time: between "
            f"{min(tenths):.0f} % and {max(tenths):.0f} % in the tenths of the run."
        )
    else:
        title = "Nothing ran."
    return Chart(
        id=f"utilization{prefix}",
        title=title,
        note="Blue is busy, every other colour a cause of idleness."
        + (
            " Dotted: a batch is delivered."
            if few
            else f" Each step is the mean of about {_per_step(time)} batches."
        ),
        data=data,
        layout={
            "xaxis": axis("seconds", range=[0, end]),
            "yaxis": axis("% of the engines' time", range=[0, 100], fixedrange=True),
            "hovermode": "x unified",
        },
        height=300,
        keys=_keys(time.series),
        of=run.name,
    )


def engine_timeline(run: ReportData, prefix: str = "") -> Chart:
    """Draw a few batches, with a row for each engine."""
    near = run.timeline
    count = max(1, len(near.engines))
    height = 1 / count
    data: list[Spec] = []
    layout: Spec = {
        "xaxis": axis(
            "seconds", range=[near.start, near.end], anchor=f"y{count}" if count > 1 else "y"
        ),
        "hovermode": "x unified",
        "annotations": [],
    }
    seen: dict[str, Sequence[float]] = {}
    for row, engine in enumerate(near.engines):
        place = "" if row == 0 else str(row + 1)
        top = 1 - row * height
        layout[f"yaxis{place}"] = {
            "domain": [top - height, top - 0.34 * height],
            "range": [0, 100],
            "fixedrange": True,
            "tickvals": [0, 100],
            "ticksuffix": " %",
        }
        layout["annotations"].append(
            note_on(f"{engine.name}: busy {percent(engine.utilization)}", y=top - 0.34 * height)
        )
        data += areas(engine.series, start=near.start, stops=near.stops, place=place)
        data.append(marks(near.deliveries, 100, name="batch delivered", place=place))
        seen.update(engine.series)
    busy = [engine.utilization for engine in near.engines]
    return Chart(
        id=f"engines{prefix}",
        title=_engines_title(near, busy),
        note=f"{_shown(len(near.engines), near.engines_in_all, 'engines')}The shares of each "
        "engine's slots over time, in %. Dotted: a batch is delivered.",
        data=data,
        layout=layout,
        height=76 + _ROW * count,
        keys=_keys(seen),
        of=run.name,
    )


def responses(run: ReportData, prefix: str = "") -> Chart:
    """Draw a few batches: each response is a line, and its colour is the version that sampled
    it."""
    near = run.timeline
    versions = sorted({v for bar in near.responses for _, _, v in bar.pieces})
    data: list[Spec] = []
    for version in versions:
        x: list[float] = []
        y: list[float] = []
        for row, bar in enumerate(near.responses):
            for start, stop, of in bar.pieces:
                if of == version:
                    x += [start, stop, float("nan")]
                    y += [row, row, float("nan")]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": numbers(x),
                "y": numbers(y),
                "line": {"width": 1.6, "color": PALETTE[version % len(PALETTE)]},
                "name": f"version {version}",
                "hoverinfo": "name",
            }
        )
    rows = max(1, len(near.responses))
    data.append(marks(near.deliveries, rows, name="batch delivered"))
    mixed = sum(1 for bar in near.responses if len({v for _, _, v in bar.pieces}) > 1)
    pieces = max(1, len(near.responses))
    return Chart(
        id=f"responses{prefix}",
        title=f"{percent(mixed / pieces)} of the responses in {_batches(near)} were under way "
        "while the policy changed.",
        note=f"{_shown(len(near.responses), near.responses_in_all, 'responses')}Each line is a "
        "response, in order of launch, its colour the policy version that samples it. Grey: an "
        "engine stands still. Dotted: a batch is delivered.",
        data=data,
        layout={
            "xaxis": axis("seconds", range=[near.start, near.end]),
            "yaxis": axis(
                "responses", range=[rows + 1, -1], showticklabels=False, fixedrange=True
            ),
            "shapes": [
                {
                    "type": "rect", "xref": "x", "yref": "paper", "x0": start, "x1": stop,
                    "y0": 0, "y1": 1, "fillcolor": "@band", "line": {"width": 0}, "layer": "below",
                }
                for start, stop in near.pauses
            ],
            "hovermode": "closest",
        },
        height=420,
        keys=[
            Key(label=f"version {v}", colour=PALETTE[v % len(PALETTE)], line=True)
            for v in versions[:16]
        ],
        of=run.name,
    )  # fmt: skip


def gpu(run: ReportData, end: float, prefix: str = "") -> Chart:
    """Draw the samples; the note is their own label."""
    means = [float(np.mean(line.percent)) for line in run.gpu]
    return Chart(
        id=f"gpu{prefix}",
        title=f"Samplers saw {np.mean(means):.0f} % on average, where the slots were "
        f"{percent(run.time.utilization)} busy.",
        note=run.gpu_label,
        data=[
            {
                "type": "scatter",
                "mode": "lines",
                "x": numbers(line.times),
                "y": numbers(line.percent),
                "line": {
                    "width": 1.6,
                    "color": PALETTE[i % len(PALETTE)],
                    "dash": "solid" if i < len(PALETTE) else "dot",
                },
                "name": text(line.name),
                "hovertemplate": "%{y:.0f} %",
            }
            for i, line in enumerate(run.gpu)
        ],
        layout={
            "xaxis": axis("seconds", range=[0, end]),
            "yaxis": axis("%", range=[0, 102], fixedrange=True),
            "hovermode": "x unified",
        },
        height=260,
        keys=[
            Key(
                label=line.name,
                colour=PALETTE[i % len(PALETTE)],
                line=True,
                dashed=i >= len(PALETTE),
            )
            for i, line in enumerate(run.gpu)
        ],
        of=run.name,
    )


# --- words ---------------------------------------------------------------------------------------


def label(place: int, runs: Sequence[ReportData]) -> str:
    """The name of a run, with A or B before it if there are two runs."""
    return f"{'AB'[place]}: {runs[place].name}" if len(runs) > 1 else runs[place].name


def _lost(place: int, runs: Sequence[ReportData]) -> str:
    run = runs[place]
    most, busy = lost_most(run.time), percent(run.time.utilization)
    who = f"{'AB'[place]}: " if len(runs) > 1 else ""
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


def _share(run: ReportData, part: Part) -> float:
    return next(found.share for found in run.time.parts if found.part == part)


def _keys(series: dict[str, Sequence[float]] | dict[str, list[float]]) -> list[Key]:
    return part_keys([part for part in PART_COLOURS if part in series])


def _tenths(time: EngineTime) -> list[float]:
    there = [np.array(time.series[part]) for part in BUSY if part in time.series]
    if not there:
        return []
    return [float(piece.mean()) for piece in np.array_split(sum(there), _TENTHS)]


# --- batch charts --------------------------------------------------------------------------------

# Draws the charts about batches: how long, how old and how biased their responses are.

_OF_RUN = (PALETTE[5], PALETTE[0])
"""The colours of the runs A and B."""
_DRAWN = ("@muted", PALETTE[4])
_EQUAL = 0.01
"""A bias below this share of the mean length counts as none."""


def lengths(runs: Sequence[ReportData]) -> Chart:
    """Draw delivered lengths and the law that they are drawn from. Both axes are logarithmic."""
    data: list[Spec] = []
    keys: list[Key] = []
    for place, run in enumerate(runs):
        who = f"{'AB'[place]}: " if len(runs) > 1 else ""
        curves = [
            ("drawn", "drawn (estimated)", _DRAWN[place], 5.0, "solid"),
            ("delivered", "delivered", _OF_RUN[place], 2.2, "solid"),
            ("first", "of these, the first batch", _OF_RUN[place], 1.4, "dot"),
        ]
        for name, what, colour, width, dash in curves:
            curve = run.lengths.get(name)
            if curve is not None:
                data.append(_survival(curve, f"{who}{what}", colour, width, dash))
                keys.append(
                    Key(label=f"{who}{what}", colour=colour, line=True, dashed=dash == "dot")
                )
    return Chart(
        id="lengths",
        title=" ".join(_law(place, runs) for place in range(len(runs))),
        note="The share of responses that are longer than a length; both axes are logarithmic. "
        "Drawn is what the policy would have produced: an estimate (Kaplan and Meier) that counts "
        "what never finished. Where delivered lies below drawn, long responses are missing.",
        data=data,
        layout={
            "xaxis": _length_axis(runs),
            "yaxis": axis(
                "share of longer responses, %", type="log", fixedrange=True, dtick=1,
                tickformat="~g",
            ),
            "hovermode": "closest",
        },
        height=400,
        keys=keys,
    )  # fmt: skip


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
        data=_grouped(runs, [run.staleness.tokens_by_age for run in runs], names, AGE_COLOURS),
        layout=_grouped_layout("staleness, versions", "delivered tokens, %"),
        height=300,
        keys=_run_keys(runs),
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
        data=_grouped(runs, counts, names, AGE_COLOURS),
        layout=_grouped_layout("versions that sampled the response", "delivered responses, %"),
        height=300,
        keys=_run_keys(runs),
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
    names = _numbered(_last([sum(row) for row in ledger.by_batch]), first=0, last=5)
    return Chart(
        id=f"batches{prefix}",
        title=title,
        note="Each bar is a batch, divided by the staleness of its tokens."
        if not some
        else "Each bar is some batches together, divided by the staleness of their tokens.",
        data=[
            {
                "type": "bar",
                "x": numbers([batch + 1 for batch in together]),
                "y": numbers([100 * share for share in ledger.by_batch[age]]),
                "name": _age(name),
                "marker": {"color": AGE_COLOURS[age], "line": {"width": 0}},
                "hovertemplate": "%{y:.1f} %",
            }
            for age, name in enumerate(names)
            if ledger.by_batch
        ],
        layout={
            "barmode": "stack",
            "bargap": 0.12,
            "xaxis": axis("batch", tickformat="d"),
            "yaxis": axis("% of its tokens", range=[0, 100], fixedrange=True),
            "hovermode": "x unified",
        },
        height=300,
        keys=[Key(label=_age(name), colour=AGE_COLOURS[a]) for a, name in enumerate(names)],
        of=run.name,
    )


def bias(runs: Sequence[ReportData]) -> Chart:
    """Draw the length bias of everything delivered so far, by batch: as measured, and as the
    responses in flight predict it."""
    data: list[Spec] = []
    keys: list[Key] = []
    for place, run in enumerate(runs):
        found = run.bias.transient
        if found is None:
            continue
        who = f"{'AB'[place]}: " if len(runs) > 1 else ""
        one = PALETTE[0] if len(runs) == 1 else _OF_RUN[place]
        for name, values, colour, dash in (
            ("measured", found.measured_by_batch, one, "solid"),
            ("foretold by what is in flight", found.predicted_by_batch, PALETTE[1], "dash"),
        ):
            if dash == "dash" and len(runs) > 1:
                continue
            at = _evenly(len(values))
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": numbers(at + 1),
                    "y": numbers(100 * np.asarray(values, dtype=np.float64)[at]),
                    "line": {"width": 2.2, "color": colour, "dash": dash},
                    "name": f"{who}{name}",
                    "hovertemplate": "%{y:+.1f} %",
                }
            )
            keys.append(Key(label=f"{who}{name}", colour=colour, line=True, dashed=dash == "dash"))
    return Chart(
        id="bias",
        title=" ".join(_transient(place, runs) for place in range(len(runs))),
        note=f"The mean length of everything delivered so far, against {_mean(runs)}. "
        "Short responses finish first, so a run begins below 0; what is in flight brings it back. "
        "A gap that stays is a censor.",
        data=data,
        layout={
            "xaxis": axis("batches delivered", tickformat="d"),
            "yaxis": axis("off the mean length, %", fixedrange=True, zeroline=True),
            "hovermode": "x unified",
        },
        height=320,
        keys=keys,
    )


def distances(runs: Sequence[ReportData]) -> list[Chart]:
    """Draw the distance of each batch's lengths from the drawn law, with what is expected of a
    batch drawn at random. Older logs do not have it; there is no chart then."""
    data: list[Spec] = []
    keys: list[Key] = []
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
        who = f"{'AB'[place]}: " if len(runs) > 1 else ""
        one = PALETTE[0] if len(runs) == 1 else _OF_RUN[place]
        for name, values, dash in (("batch", own, "solid"), ("drawn at random", usual, "dash")):
            at = [i for i in _evenly(len(values)).tolist() if values[i] is not None]
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": numbers([i + 1 for i in at]),
                    "y": numbers([values[i] or 0.0 for i in at]),
                    "line": {"width": 2.2, "color": one, "dash": dash},
                    "name": f"{who}{name}",
                    "hovertemplate": "%{y:.3f}",
                }
            )
            keys.append(Key(label=f"{who}{name}", colour=one, line=True, dashed=dash == "dash"))
    if not said:
        return []
    title = "; ".join(said)
    chart = Chart(
        id="distances",
        title=f"{title[0].upper()}{title[1:]}.",
        note="Kolmogorov's distance: the largest difference between the shares of responses up to "
        "a length, in the batch and in the law that all lengths are drawn from (estimated when the "
        "batch was delivered). Batches that are all short or all long are far from it.",
        data=data,
        layout={
            "xaxis": axis("batch", tickformat="d"),
            "yaxis": axis("distance from the drawn law", fixedrange=True, rangemode="tozero"),
            "hovermode": "x unified",
        },
        height=300,
        keys=keys,
    )
    return [chart]


def forecasts(run: ReportData, who: str, prefix: str = "") -> Chart | None:
    """Draw the efficiency that automatic scheduling forecast for each batch beside what happened.
    There is no chart of a run without forecasts."""
    ledger = run.forecasts
    if ledger is None:
        return None
    at = numbers([index + 1 for index in ledger.batches])
    outcomes = [figures.efficiency for figures in ledger.by_batch]
    known = [(n, e) for n, e in zip(ledger.batches, outcomes, strict=True) if e is not None]
    return Chart(
        id=f"forecasts{prefix}",
        title=_how_right(ledger.steady, who),
        note="The line is the forecast of the schedule in force, which changes with each choice of "
        "a schedule. A point is a batch. A forecast is for the mean of many batches, whose single "
        "ones scatter; where points lie below the line on average, it was too good.",
        data=[
            {
                "type": "scatter",
                "mode": "lines",
                "x": at,
                "y": numbers([100 * figures.efficiency_forecast for figures in ledger.by_batch]),
                "line": {"width": 2.2, "color": PALETTE[0], "shape": "hv"},
                "name": "forecast",
                "text": [text(figures.schedule) for figures in ledger.by_batch],
                "hovertemplate": "%{y:.1f} %<br>%{text}",
            },
            {
                "type": "scatter",
                "mode": "markers",
                "x": numbers([index + 1 for index, _ in known]),
                "y": numbers([100 * efficiency for _, efficiency in known]),
                "marker": {"size": 6, "color": PALETTE[5]},
                "name": "outcome",
                "hovertemplate": "%{y:.1f} %",
            },
        ],
        layout={
            "xaxis": axis("batch", tickformat="d"),
            "yaxis": axis("T_bound / time, %", fixedrange=True, rangemode="tozero"),
            "hovermode": "x unified",
        },
        height=300,
        keys=[
            Key(label="forecast", colour=PALETTE[0], line=True),
            Key(label="outcome", colour=PALETTE[5]),
        ],
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
    return Chart(
        id="deciles",
        title=f"{title[0].upper()}{title[1:]}.",
        note="Delivered responses in ten classes of equal number by their length.",
        data=[
            {
                "type": "bar",
                "x": list(range(1, 11)),
                "y": numbers(figures.staleness_mean),
                "name": text(label(place, runs)),
                "marker": {"color": PALETTE[2] if len(runs) == 1 else _OF_RUN[place]},
                "customdata": [amount(length) for length in figures.mean_length],
                "hovertemplate": "%{y:.2f} versions; mean length %{customdata} tokens",
            }
            for place, figures in known
        ],
        layout={
            "barmode": "group",
            "xaxis": axis("tenths of the responses, shortest first", dtick=1),
            "yaxis": axis("mean staleness, versions", fixedrange=True),
        },
        height=320,
        keys=_run_keys(runs),
    )


# --- parts ---------------------------------------------------------------------------------------


def _survival(curve: LengthCurve, name: str, colour: str, width: float, dash: str) -> Spec:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": numbers(curve.lengths),
        "y": numbers([100 * share for share in curve.longer]),
        "line": {"width": width, "color": colour, "shape": "hv", "dash": dash},
        "name": text(name),
        "hovertemplate": "%{y:.3g} % are longer than %{x:,.0f} tokens",
    }


def _grouped(
    runs: Sequence[ReportData],
    shares: Sequence[Sequence[float]],
    names: Sequence[str],
    colours: Sequence[str],
) -> list[Spec]:
    return [
        {
            "type": "bar",
            "x": list(names),
            "y": numbers([100 * share for share in shares[place][: len(names)]]),
            "name": text(label(place, runs)),
            "marker": {"color": list(colours[: len(names)]) if len(runs) == 1 else _OF_RUN[place]},
            "text": [percent(share) for share in shares[place][: len(names)]],
            "textposition": "outside",
            "cliponaxis": False,
            "hovertemplate": "%{x}: %{y:.1f} %",
        }
        for place in range(len(runs))
    ]


def _grouped_layout(x: str, y: str) -> Spec:
    return {
        "barmode": "group",
        "xaxis": axis(x, type="category", fixedrange=True),
        "yaxis": axis(y, fixedrange=True, rangemode="tozero"),
        "uniformtext": {"mode": "hide", "minsize": 9},
    }


def _run_keys(runs: Sequence[ReportData]) -> list[Key]:
    if len(runs) == 1:
        return []
    return [Key(label=label(i, runs), colour=_OF_RUN[i]) for i in range(len(runs))]


def _numbered(count: int, *, first: int, last: int) -> list[str]:
    """ "0", "1", …; the last of all classes has all that are larger."""
    return [f"{n} or more" if n == last else str(n) for n in range(first, first + count)]


def _last(shares: Sequence[float]) -> int:
    """The entries up to the last one that is not 0; at least one."""
    return max((i + 1 for i, share in enumerate(shares) if share), default=1)


def _evenly(count: int, at_most: int = 240) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.unique(np.linspace(0, max(0, count - 1), min(count, at_most)).astype(np.int64))


def _length_axis(runs: Sequence[ReportData]) -> Spec:
    """The axis from the shortest response to the longest, with ticks at 1, 2, 5, 10, …"""
    curves = [curve for run in runs for curve in run.lengths.values() if len(curve.lengths) > 1]
    least = min((curve.lengths[1] for curve in curves), default=1.0)
    most = max((curve.lengths[-1] for curve in curves), default=10.0)
    ticks = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if 0.8 * least <= tick <= 1.2 * most]
    return axis(
        "response length, tokens",
        type="log",
        range=[math.log10(0.8 * least), math.log10(1.15 * most)],
        tickvals=shown,
        ticktext=[amount(tick) for tick in shown],
    )


def _age(name: str) -> str:
    return {"0": "on-policy", "1": "1 version old"}.get(name, f"{name} versions old")


# --- words ---------------------------------------------------------------------------------------


def _whose(place: int, runs: Sequence[ReportData]) -> str:
    return "the" if len(runs) == 1 else f"{'AB'[place]}'s"


def _law(place: int, runs: Sequence[ReportData]) -> str:
    run = runs[place]
    who = f"{'AB'[place]}: " if len(runs) > 1 else ""
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
    who = f"{'AB'[place]}: " if len(runs) > 1 else ""
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

"""The colours of A and B."""
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
        data=_bars(runs, rows, names),
        layout=_layout("staleness, versions"),
        height=300,
        keys=_alignment_keys(runs),
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
        data=_bars(runs, rows, names),
        layout=_layout("position in the response, from"),
        height=300,
        keys=_alignment_keys(runs),
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
        data=[_bar([name for name, _ in shown], [each for _, each in shown], run.name, PALETTE[0])],
        layout=_layout("engine"),
        height=300,
        of=run.name,
    )


# --- parts ---------------------------------------------------------------------------------------


def _reported(runs: Sequence[ReportData]) -> list[tuple[int, ReportData]]:
    return [(place, run) for place, run in enumerate(runs) if run.alignment is not None]


def _bars(
    runs: Sequence[ReportData], rows: Sequence[Sequence[DifferenceFigures]], names: Sequence[str]
) -> list[Spec]:
    return [
        _bar(
            names,
            row[: len(names)],
            label(place, runs),
            PALETTE[0] if len(runs) == 1 else _OF_RUN[place],
        )
        for (place, _), row in zip(_reported(runs), rows, strict=True)
    ]


def _bar(names: Sequence[str], row: Sequence[DifferenceFigures], name: str, colour: str) -> Spec:
    return {
        "type": "bar",
        "x": [text(each) for each in names[: len(row)]],
        "y": numbers([float("nan") if each.k3 is None else each.k3 for each in row]),
        "name": text(name),
        "marker": {"color": colour},
        "customdata": [
            f"{each.tokens:,} tokens, {percent(each.beyond_share)} of them beyond the bound"
            for each in row
        ],
        "hovertemplate": "%{y:.2~g} nats; %{customdata}",
    }


def _layout(x: str) -> Spec:
    return {
        "barmode": "group",
        "xaxis": axis(x, type="category", fixedrange=True, tickangle=0),
        "yaxis": axis("k3, nats", fixedrange=True, rangemode="tozero", tickformat=".2~e"),
    }


def _alignment_keys(runs: Sequence[ReportData]) -> list[Key]:
    if len(runs) == 1:
        return []
    return [Key(label=label(place, runs), colour=_OF_RUN[place]) for place, _ in _reported(runs)]


# --- words ---------------------------------------------------------------------------------------


def _whose_tokens(place: int, runs: Sequence[ReportData]) -> str:
    return "The" if len(runs) == 1 else f"{'AB'[place]}'s"


def _finding(place: int, runs: Sequence[ReportData]) -> str:
    found = runs[place].alignment
    who = f"{'AB'[place]}: " if len(runs) > 1 else ""
    if found is None or found.whole.k3 is None:
        return f"{who}No token of staleness 0 was compared."
    return (
        f"{who}With the same weights, engine and trainer differ by {nats(found.whole.k3)}, and "
        f"{percent(found.whole.beyond_share)} of the tokens by more than {found.bound:g} nats."
    )
