"""Draws the charts about time: where it went, when, and on which engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aprilsched.analysis.colours import PALETTE, PART_COLOURS
from aprilsched.analysis.report.figure import (
    Chart,
    Key,
    Spec,
    areas,
    axis,
    marks,
    note_on,
    numbers,
    part_keys,
    text,
)
from aprilsched.analysis.report.report_data import (
    MARKED,
    EngineTime,
    PartTime,
    ReportData,
    Timeline,
)
from aprilsched.analysis.report.words import percent
from aprilsched.telemetry.engine_time import BUSY, PARTS, Part

__all__ = ["engine_timeline", "gpu", "label", "losses", "lost_most", "responses", "utilization"]

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
