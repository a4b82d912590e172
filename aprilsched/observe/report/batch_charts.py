"""Charts about batches: how long, how old and how biased their responses are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from aprilsched.observe.figures.bias_collector import sample_distribution
from aprilsched.observe.figures.figures import ForecastFigures
from aprilsched.observe.log.over_time import lengths_of, tokens_by_class
from aprilsched.observe.report import shared_charts
from aprilsched.observe.report.chart_model import PALETTE, STALENESS_COLOURS, Axis, Chart, Series
from aprilsched.observe.report.report_data import RunReport
from aprilsched.observe.report.shared_charts import OF_RUNS, evenly
from aprilsched.observe.report.words import percent, written

_EQUAL = 0.01
"""A bias below this share of the mean length counts as none."""
_BATCH_BARS = 60
_SHOWN_FORECASTS = 400


def lengths(runs: Sequence[RunReport]) -> Chart:
    """Draw delivered lengths and the estimated length distribution. Both axes are logarithmic."""
    first = "of these, the first batch"
    curves: dict[str, tuple[shared_charts.Curve, str, float]] = {}
    for run in runs:
        bias, colour = run.summary.bias, colour_of(run, PALETTE[5])
        muted = PALETTE[4] if run.letter == "B" else "@muted"
        for what, dist, drawn_in, width in (
            ("drawn (estimated)", bias.drawn, muted, 5.0),
            ("delivered", bias.delivered, colour, 2.2),
            (first, sample_distribution(lengths_of(run.run.deliveries[:1])), colour, 1.4),
        ):
            if dist is not None:
                curves[f"{run.who}{what}"] = (dist.lengths, dist.longer), drawn_in, width
    chart = shared_charts.longer_than(curves, dotted=[f"{run.who}{first}" for run in runs])
    return replace(
        chart,
        id="lengths",
        title=" ".join(map(_distribution, runs)),
        note="The share of responses that are longer than a length; both axes are logarithmic. "
        "Drawn is what the policy would have produced: an estimate (Kaplan and Meier) that counts "
        "what never finished. Where delivered lies below drawn, long responses are missing.",
        x=_length_axis(chart),
    )


def _distribution(run: RunReport) -> str:
    drawn, delivered = run.summary.bias.drawn, run.summary.bias.delivered
    if drawn is None or delivered is None:
        return f"{run.who}Nothing was delivered, so there are no lengths to compare."
    off = delivered.mean / drawn.mean - 1
    means = f"mean {written(delivered.mean)} against {written(drawn.mean)} tokens"
    if abs(off) < _EQUAL:
        return f"{run.who}Delivered responses are as long as those drawn ({means})."
    longer = "longer" if off > 0 else "shorter"
    return (
        f"{run.who}Delivered responses are {percent(abs(off))} {longer} than those drawn ({means})."
    )


def _length_axis(chart: Chart) -> Axis:
    """Return the axis from the shortest response to the longest, with ticks at 1, 2, 5, 10, …"""
    curves = [series.x for series in chart.series if len(series.x) > 1]
    least = min((float(curve[1]) for curve in curves), default=1.0)
    most = max((float(curve[-1]) for curve in curves), default=10.0)
    ticks = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if 0.8 * least <= tick <= 1.2 * most]
    return replace(
        chart.x, range=(0.8 * least, 1.15 * most), ticks={tick: written(tick) for tick in shown}
    )


def staleness_by_batch(run: RunReport) -> Chart:
    """Draw the staleness of each batch's tokens as stacked bars."""
    tokens = tokens_by_class(run.run, len(STALENESS_COLOURS))
    pieces = np.array_split(np.arange(len(tokens)), max(1, min(_BATCH_BARS, len(tokens))))
    together = [piece for piece in pieces if piece.size]
    sums = np.array([tokens[piece].sum(axis=0) for piece in together]).reshape(
        -1, len(STALENESS_COLOURS)
    )
    shares = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
    title = "No batch was delivered."
    if together:
        stale = 100 * (1 - shares[:, 0])
        late = stale[-max(1, len(stale) // 4) :]
        title = (
            f"The first batch is {stale[0]:.0f} % off-policy, the last quarter of them "
            f"{np.mean(late):.0f} %."
        )
    chart = shared_charts.staleness_by_batch(
        [int(piece[0]) + 1 for piece in together], shares.T.tolist()
    )
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


def rewards(runs: Sequence[RunReport]) -> list[Chart]:
    """Draw the mean reward of each batch; no chart without rewards."""
    series: list[Series] = []
    title: list[str] = []
    for run in runs:
        means = {b.index + 1: b.rewards.mean for b in run.summary.per_batch}
        found = np.array([(at, mean) for at, mean in means.items() if mean is not None])
        if not found.size:
            continue
        x, y = found[evenly(len(found))].T
        series.append(Series(name=run.label, x=x, y=y, colour=colour_of(run), hover="%{y:.3~g}"))
        first, last = (written(mean, "reward") for mean in found[[0, -1], 1].tolist())
        title.append(f"{run.who}The mean reward is {first} in the first batch, {last} in the last.")
    chart = Chart(
        id="rewards",
        title=" ".join(title),
        note="The mean reward of the responses of each batch, in the order of delivery.",
        series=series,
        x=Axis(label="batch", unit="whole"),
        y=Axis(label="mean reward"),
        together=True,
        legend=len(runs) > 1,
    )
    return [chart] if series else []


def bias(runs: Sequence[RunReport]) -> Chart:
    """Draw the length bias of everything delivered so far, by batch: as measured, and as the
    responses in flight predict it."""
    chart = shared_charts.bias_over_batches(
        {run.letter: run.summary.bias.transient for run in runs},
        colours=[colour_of(run) for run in runs],
        predicted=len(runs) == 1,
    )
    found = [transient for run in runs if (transient := run.summary.bias.transient)]
    mean = "the mean of its workload, or of what was drawn"
    if len(found) == 1:
        known = found[0].reference == "workload_mean"
        mean = "the workload's own mean" if known else "the mean drawn"
        mean += f" ({written(found[0].mean)} tokens)"
    return replace(
        chart,
        id="bias",
        title=" ".join(map(_transient, runs)),
        note=f"The mean length of everything delivered so far, against {mean}. "
        "Short responses finish first, so a run starts below 0; what is in flight brings it back. "
        "A gap that stays is a censor.",
        height=320,
    )


def _transient(run: RunReport) -> str:
    found, censored = run.summary.bias.transient, run.summary.bias.censoring.policies
    if found is None:
        return f"{run.who}No batch was delivered, so there is no bias to speak of."
    off = f"{run.who}The length bias is {percent(found.measured, signed=True)}"
    if censored:
        return f"{off}, and part of it stays: responses were dropped."
    if abs(found.measured) < _EQUAL:
        return f"{off}: what the trainer got is not too short."
    further = found.further_batches_to_1_percent
    if further == 0:
        return f"{off}, more than what is in flight explains."
    more = f"{further:,} more {'batch' if further == 1 else 'batches'}"
    return f"{off} so far; it is below 1 % after {more}."


def forecasts(run: RunReport) -> Chart | None:
    """Draw each batch's efficiency, as forecast by automatic scheduling and as measured; None
    without forecasts."""
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
                hover_text=[figures.schedule for _, figures in shown],
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
        f"the burn-in, and {percent(steady.efficiency)} came: {percent(off, signed=True)}."
    )


def colour_of(run: RunReport, alone: str = PALETTE[0]) -> str:
    """Return the colour of one of two runs, or of one that is `alone`."""
    return OF_RUNS["AB".index(run.letter)] if run.letter else alone
