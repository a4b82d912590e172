"""Charts that the report and the notebooks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprilsched.observe.figures.engine_time import PART_LABELS
from aprilsched.observe.figures.run_figures import TransientFigures
from aprilsched.observe.log.over_time import Bar
from aprilsched.observe.report.chart_model import (
    PALETTE,
    PART_COLOURS,
    STALENESS_COLOURS,
    Axis,
    Chart,
    Series,
    Values,
)

OF_RUNS = (PALETTE[5], PALETTE[0])
"""The colours of two runs side by side."""
_OLDEST = len(STALENESS_COLOURS) - 1


def time_by_part(
    rows: Mapping[str, Mapping[Any, float]],
    *,
    x: Axis,
    written: Callable[[float], str],
    colours: Mapping[Any, str],
    labels: Mapping[Any, str],
) -> Chart:
    """Draw a bar for each run, divided into parts of its time, each with a colour and a label;
    `written` formats the numbers in the bar."""
    names = list(rows)
    values = {part: [row.get(part, 0.0) for row in rows.values()] for part in colours}
    return Chart(
        series=[
            Series(
                kind="bar",
                name=labels[part],
                x=names,
                y=found,
                colour=colours[part],
                texts=[written(value) for value in found],
                hover=f"{labels[part]}: %{{x:.1%}}<extra></extra>",
            )
            for part, found in values.items()
            if any(value > 0 for value in found)
        ],
        x=x,
        y=Axis(label="", categories=True),
        stacked=True,
        across=True,
    )


def areas(
    shares: Mapping[str, NDArray[np.float64]], *, start: float, stops: Sequence[float], row: int = 0
) -> list[Series]:
    """Return the shares of parts of the time as stacked areas; the intervals end at `stops`."""
    return [
        Series(
            kind="area",
            name=PART_LABELS[part],
            x=[start, *stops],
            y=np.append(shares[part], shares[part][-1:]),
            colour=PART_COLOURS[part],
            hover="%{y:.1%}",
            row=row,
        )
        for part in PART_COLOURS
        if part in shares
    ]


def parts_over_time(
    shares: Mapping[str, NDArray[np.float64]],
    *,
    start: float,
    stops: Sequence[float],
    end: float | None = None,
    marks: Sequence[float] = (),
) -> Chart:
    """What the engines' slots do over time: busy parts below, and idle ones above by their
    cause."""
    return Chart(
        series=areas(shares, start=start, stops=stops),
        x=Axis(label="seconds", range=(start, stops[-1] if end is None else end)),
        y=Axis(label="share of all slots", unit="share", range=(0, 1)),
        marks=marks,
        together=True,
    )


def responses(
    bars: Sequence[Bar],
    *,
    start: float,
    end: float,
    marks: Sequence[float],
    pauses: Sequence[tuple[float, float]],
    width: float = 1.6,
) -> Chart:
    """When each response was generated; its colour is the version that sampled it."""
    pieces: dict[int, list[tuple[float, float, int]]] = {}
    for row, bar in enumerate(bars):
        for low, stop, version in bar:
            pieces.setdefault(version, []).append((low, stop, row))
    nan = float("nan")
    return Chart(
        series=[
            Series(
                name=f"version {version}",
                x=[x for low, stop, _ in found for x in (low, stop, nan)],
                y=[y for _, _, row in found for y in (row, row, nan)],
                colour=PALETTE[version % len(PALETTE)],
                width=width,
            )
            for version, found in sorted(pieces.items())
        ],
        x=Axis(label="seconds", range=(start, end)),
        y=Axis(label="responses, in order of launch", range=(max(1, len(bars)) + 1, -1), ticks={}),
        marks=marks,
        pauses=pauses,
        height=420,
    )


def staleness_by_batch(batches: Sequence[int], shares: Sequence[Sequence[float]]) -> Chart:
    """Draw the staleness of each batch's tokens, from the share of each staleness in each of
    `batches`. The last one contains all older tokens."""
    last = max((staleness + 1 for staleness, share in enumerate(shares) if any(share)), default=1)
    return Chart(
        series=[
            Series(
                kind="bar",
                name=_staleness(staleness),
                x=list(batches),
                y=shares[staleness],
                colour=STALENESS_COLOURS[staleness],
                texts=[f"{share:.0%}" for share in shares[staleness]],
                hover="%{y:.1%}",
            )
            for staleness in range(min(last, len(shares)))
        ],
        x=Axis(label="batch", unit="whole"),
        y=Axis(label="share of its tokens", unit="share", range=(0, 1)),
        stacked=True,
        together=True,
    )


def bias_over_batches(
    runs: Mapping[str, TransientFigures | None], *, colours: Sequence[str], predicted: bool
) -> Chart:
    """Draw the bias of everything delivered so far, as measured, and as `predicted` from the
    responses in flight; a run without a name is the only one."""
    series: list[Series] = []
    for (name, figures), colour in zip(runs.items(), colours, strict=False):
        if figures is None:
            continue
        drawn = [(name or "measured", figures.measured_by_batch, colour)]
        if predicted:
            other = colour if name else PALETTE[1]
            drawn.append(("what is in flight explains", figures.predicted_by_batch, other))
        for place, (label, values, of) in enumerate(drawn):
            at = evenly(len(values))
            series.append(
                Series(
                    name=label,
                    x=at + 1,
                    y=np.asarray(values, dtype=np.float64)[at],
                    colour=of,
                    dash="dash" if place else "solid",
                    hover="%{y:+.1%}",
                )
            )
    return Chart(
        series=series,
        x=Axis(label="batches delivered", unit="whole"),
        y=Axis(label="mean length so far, off the true mean", unit="share"),
        level=0,
        together=True,
    )


Curve = tuple[Values, Values]
"""Lengths in tokens, and the share of responses that are longer than each."""


def longer_than(
    curves: Mapping[str, tuple[Curve, str, float]], *, dotted: Sequence[str] = ()
) -> Chart:
    """Draw the share of responses that are longer than a length, with a curve, a colour and a width
    for each name; names in `dotted` get dotted lines. Both axes are logarithmic."""
    return Chart(
        series=[
            Series(
                name=name,
                x=x,
                y=y,
                colour=colour,
                width=width,
                dash="dot" if name in dotted else "solid",
                step=True,
                hover="%{y:.3~%} are longer than %{x:,.0f} tokens",
            )
            for name, ((x, y), colour, width) in curves.items()
        ],
        x=Axis(label="response length in tokens", unit="tokens", log=True),
        y=Axis(label="share of responses longer than that", unit="share", log=True),
        height=400,
    )


def evenly(count: int, at_most: int = 240) -> NDArray[np.int64]:
    """Return the indices of at most `at_most` of `count` values, evenly spaced."""
    return np.unique(np.linspace(0, max(0, count - 1), min(count, at_most)).astype(np.int64))


def _staleness(staleness: int) -> str:
    if staleness == _OLDEST:
        return f"staleness {staleness} or more"
    return f"staleness {staleness}" if staleness else "on-policy"
