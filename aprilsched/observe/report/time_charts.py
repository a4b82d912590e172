"""Charts over time: engines, GPUs, batches and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aprilsched.observe.figures.engine_time import BUSY, PART_INDEX, PART_LABELS
from aprilsched.observe.figures.rollout_time import ROLLOUT_PART_LABELS
from aprilsched.observe.log.over_time import bars
from aprilsched.observe.log.usage import busy_share
from aprilsched.observe.report import shared_charts
from aprilsched.observe.report.chart_model import (
    PALETTE,
    PART_COLOURS,
    ROLLOUT_COLOURS,
    Axis,
    Chart,
    Series,
)
from aprilsched.observe.report.report_data import EngineTime, PartTime, RunReport
from aprilsched.observe.report.words import percent, written

_BINS = 240
_MARKED = 20
"""Largest number of batches whose ends can be distinguished in a chart of the whole run."""
_SHOWN_BATCHES = 5
SHOWN_ENGINES = 12
_SHOWN_RESPONSES = 240
_SHOWN_PAUSES = 200
_ROW = 64
_TENTHS = 10
_SMALL = 0.02


def lost_most(time: EngineTime) -> PartTime | None:
    """Return the largest part without useful work, or None if none is large enough to mention."""
    idle = [part for part in time.parts if part.part not in BUSY]
    most = max(idle, key=lambda part: part.share, default=None)
    return most if most is not None and most.share >= _SMALL else None


def losses(runs: Sequence[RunReport]) -> Chart:
    """Draw one bar for each run, divided into the parts of all engines' time."""
    chart = shared_charts.time_by_part(
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
        return f"{run.who}Engines were busy for {busy} of their time; no idle part stands out."
    return (
        f"{run.who}{percent(most.share)} of the engines' time went to: {most.label}; {busy} was "
        "busy."
    )


def rollout_time(runs: Sequence[RunReport]) -> Chart:
    """Draw one bar for each run with episodes, divided into the parts of its rollouts' time from
    launch to delivery."""
    shown = [run for run in runs if run.episodes]
    spent = [run.summary.rollout_seconds for run in shown]
    wholes = [sum(each.values()) or 1.0 for each in spent]
    shares = [
        {part: found / whole for part, found in each.items()}
        for each, whole in zip(spent, wholes, strict=True)
    ]
    chart = shared_charts.time_by_part(
        {run.label: found for run, found in zip(shown, shares, strict=True)},
        x=Axis(label="share of the rollouts' time", unit="share", range=(0, 1)),
        written=percent,
        colours=ROLLOUT_COLOURS,
        labels=ROLLOUT_PART_LABELS,
    )
    statements = [
        f"{run.who}A rollout takes {written(whole, 'seconds')}, and is at its tools for "
        f"{percent(found['tools'])} of that."
        for run, whole, found in zip(shown, wholes, shares, strict=True)
    ]
    return replace(
        chart,
        id="rollout-time",
        title=" ".join(statements),
        note="All of the time of the delivered rollouts, from launch to delivery, by what they "
        "were at. While they use their tools their places at the engines are free for others.",
        y=chart.y if len(runs) > 1 else replace(chart.y, ticks={}),
        height=72 + 56 * len(shown),
    )


def utilization(run: RunReport, end: float) -> Chart:
    """Draw all engines together over the run; the axis goes to `end`."""
    usage, batches = run.usage, len(run.run.deliveries)
    few = batches <= _MARKED
    # Bins about as long as a batch would show the phase of the batch at which they start.
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
    chart = shared_charts.parts_over_time(
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
    if count > SHOWN_ENGINES:
        shown = [i * count // SHOWN_ENGINES for i in range(SHOWN_ENGINES)]
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
            for series in shared_charts.areas(
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
    chart = shared_charts.responses(
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
    """Draw the samples; the note is their label."""
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
    """A close-up of a few batches of a run: after the burn-in, if there are enough.

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
    """Return the times in which some engine was paused, with overlapping ones merged."""
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
    """Return the share of each part that occurs, in each bin, from float64 [bins, parts]."""
    totals = seconds.sum(axis=1, keepdims=True)
    shares = np.divide(seconds, totals, out=np.zeros_like(seconds), where=totals > 0)
    return {part: shares[:, index] for part, index in PART_INDEX.items() if shares[:, index].any()}


def _shown(shown: int, there: int, what: str) -> str:
    return "" if shown >= there else f"{shown:,} of {there:,} {what} are shown, evenly chosen. "
