"""Computes everything that a report shows from the material of a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aprilsched.analysis.colours import AGE_COLOURS, PART_LABELS
from aprilsched.analysis.report.headlines import headlines
from aprilsched.analysis.report.material import Material, read_material
from aprilsched.analysis.report.report_data import (
    MARKED,
    EngineTime,
    ForecastLedger,
    LengthCurve,
    PartTime,
    ReportData,
    ResponseBar,
    StalenessLedger,
    Timeline,
    TimelineEngine,
)
from aprilsched.analysis.report.sampled import gpu_lines
from aprilsched.analysis.report.words import ran
from aprilsched.analysis.run import Run
from aprilsched.analysis.series import bars
from aprilsched.analysis.usage import RunUsage
from aprilsched.core.lengths.laws import KaplanMeier, kaplan_meier
from aprilsched.telemetry.engine_time import BUSY, PART_INDEX, PARTS
from aprilsched.telemetry.figures import AlignmentFigures
from aprilsched.types import NO_VERSION

__all__ = ["report_data"]

_BINS = 240
_SHOWN_BATCHES = 5
_SHOWN_ROLLOUTS = 240
_SHOWN_ENGINES = 12
_SHOWN_DELIVERIES = 400
_SHOWN_PAUSES = 200
_CURVE_POINTS = 240
_AGES = len(AGE_COLOURS)
_BATCH_BARS = 60


def report_data(folder: Path) -> ReportData:
    """Compute what a report shows of the run in `folder`.

    Raises:
        RunFolderError: if a file is missing or cannot be understood.
    """
    material = read_material(folder)
    run, usage = material.run, material.usage
    lines, label = gpu_lines(folder)
    return ReportData(
        name=material.name,
        version=version("aprilsched"),
        clock=run.summary.clock,
        interrupted=run.summary.interrupted,
        warnings=_warnings(run),
        ran=ran(run.config, run.summary),
        headlines=headlines(run.summary, usage.utilization),
        time=_time(run, usage),
        timeline=_timeline(run, usage),
        lengths=_lengths(material),
        staleness=_staleness(run),
        bias=run.summary.bias,
        faults=material.faults,
        forecasts=_forecasts(run),
        alignment=_alignment(run),
        gpu=lines,
        gpu_label=label,
    )


def _forecasts(run: Run) -> ForecastLedger | None:
    found = [(each.index, each.forecast) for each in run.summary.per_batch if each.forecast]
    if not found:
        return None
    shown = found[_thinning(len(found), _SHOWN_DELIVERIES)]
    return ForecastLedger(
        batches=[index for index, _ in shown],
        by_batch=[figures for _, figures in shown],
        steady=run.summary.steady_state.forecast,
    )


def _warnings(run: Run) -> list[str]:
    summary = run.summary
    log = summary.event_log_error
    return [
        text
        for text in (
            "The run was ended by Ctrl-C; the figures are those until then."
            if summary.interrupted
            else "",
            summary.error or "",
            f"The event log is not complete: {log}." if log else "",
            summary.bias.censoring.warning or "",
        )
        if text
    ]


# --- time ----------------------------------------------------------------------------------------


def _time(run: Run, usage: RunUsage) -> EngineTime:
    totals, shares = usage.seconds.sum(axis=0), usage.shares
    # Pieces that are about as long as a batch would show the phase of the batch in which they
    # begin.
    batches = len(run.deliveries)
    bins = _BINS if batches <= MARKED else min(_BINS // 2, max(MARKED, batches // 2))
    return EngineTime(
        engines=len(usage.engines),
        batches=batches,
        wall=usage.wall,
        utilization=usage.utilization,
        parts=[
            PartTime(
                part=part,
                label=PART_LABELS[part],
                seconds=_figure(totals[index]),
                share=shares[part],
                meaning=PARTS[part],
            )
            for part, index in PART_INDEX.items()
        ],
        stops=_rounded(np.linspace(0, usage.wall, bins + 1)[1:]),
        series=_shares(usage.series(bins).sum(axis=1)),
        deliveries=_rounded(_thinned(_times(run), _SHOWN_DELIVERIES)),
        by_engine={
            name: _busy(seconds) for name, seconds in zip(usage.engines, usage.seconds, strict=True)
        },
    )


def _timeline(run: Run, usage: RunUsage) -> Timeline:
    first, last = _window(run)
    times = _times(run)
    start = float(times[first - 1]) if first else 0.0
    end = float(times[last]) if times.size else run.end
    series = usage.series(_BINS, start=start, end=end)
    shown = [i * len(usage.engines) // _SHOWN_ENGINES for i in range(_SHOWN_ENGINES)]
    if len(usage.engines) <= _SHOWN_ENGINES:
        shown = list(range(len(usage.engines)))
    responses = bars(run, end, at_most=_SHOWN_ROLLOUTS, start=start)
    there = {a.rollout_id for a in run.attempts if a.start < end and a.end > start}
    return Timeline(
        start=start,
        end=end,
        first_batch=first,
        last_batch=last,
        stops=_rounded(np.linspace(start, end, _BINS + 1)[1:]),
        engines=[
            TimelineEngine(
                name=usage.engines[index],
                utilization=_busy(series[:, index].sum(axis=0)),
                series=_shares(series[:, index]),
            )
            for index in shown
        ],
        engines_in_all=len(usage.engines),
        deliveries=_rounded(times[first : last + 1]),
        pauses=_pauses(run, start, end),
        responses=[
            ResponseBar(pieces=[(_figure(a), _figure(b), v) for a, b, v in pieces])
            for pieces in responses
        ],
        responses_in_all=len(there),
    )


def _window(run: Run) -> tuple[int, int]:
    """The first and the last batch of the close view: after the burn-in, if there are enough
    batches."""
    batches = len(run.deliveries)
    first = max(0, min(run.summary.steady_state.burn_in, batches - _SHOWN_BATCHES))
    return first, max(0, min(batches, first + _SHOWN_BATCHES) - 1)


def _pauses(run: Run, start: float, end: float) -> list[tuple[float, float]]:
    """Join the times in which some engine was paused, if they meet."""
    met: list[tuple[float, float]] = []
    for pause in sorted(run.pauses, key=lambda pause: pause.start):
        if pause.end < start or pause.start > end:
            continue
        if met and pause.start <= met[-1][1]:
            met[-1] = (met[-1][0], max(met[-1][1], _figure(pause.end)))
        elif len(met) < _SHOWN_PAUSES:
            met.append((_figure(pause.start), _figure(pause.end)))
    return met


def _times(run: Run) -> NDArray[np.float64]:
    return np.array([delivery.time for delivery in run.deliveries], dtype=np.float64)


def _busy(seconds: NDArray[np.float64]) -> float:
    total = float(seconds.sum())
    return float(seconds[[PART_INDEX[part] for part in BUSY]].sum()) / total if total else 0.0


def _shares(seconds: NDArray[np.float64]) -> dict[str, list[float]]:
    """The share of each part that occurs, in each bin, from float64 [bins, parts]."""
    totals = seconds.sum(axis=1, keepdims=True)
    shares = np.divide(seconds, totals, out=np.zeros_like(seconds), where=totals > 0)
    return {
        part: [round(share, 4) for share in shares[:, index].tolist()]
        for part, index in PART_INDEX.items()
        if shares[:, index].any()
    }


# --- lengths -------------------------------------------------------------------------------------


def _lengths(material: Material) -> dict[str, LengthCurve]:
    run = material.run
    everything = [r.tokens for d in run.deliveries for r in d.rollouts]
    first = [r.tokens for d in run.deliveries[:1] for r in d.rollouts]
    curves = {
        "drawn": _curve(material.seen, material.unfinished),
        "delivered": _curve(np.maximum(everything, 1), None),
        "first": _curve(np.maximum(first, 1), None),
    }
    return {name: curve for name, curve in curves.items() if curve is not None}


def _curve(lengths: NDArray[np.int64], censored: NDArray[np.bool_] | None) -> LengthCurve | None:
    unknown = np.zeros(lengths.size, dtype=np.bool_) if censored is None else censored
    if unknown.all():
        return None
    law = kaplan_meier(lengths, unknown)
    at, longer = _steps(law)
    return LengthCurve(responses=lengths.size, mean=law.mean(), lengths=at, longer=longer)


def _steps(law: KaplanMeier) -> tuple[list[float], list[float]]:
    """The survival function, thinned evenly on both logarithmic axes."""
    known = law.survival > 0
    lengths = np.append(1, law.lengths[known]).astype(np.float64)
    survival = np.append(1.0, law.survival[known])
    if lengths.size > _CURVE_POINTS:
        right, down = np.log(lengths), -np.log(survival)
        way = right / max(1.0, float(right[-1])) + down / max(1.0, float(down[-1]))
        chosen = np.searchsorted(way, np.linspace(0, float(way[-1]), _CURVE_POINTS))
        kept = np.unique(np.minimum(chosen, lengths.size - 1))
        lengths, survival = lengths[kept], survival[kept]
    return lengths.tolist(), [_figure(share) for share in survival.tolist()]


# --- staleness -----------------------------------------------------------------------------------


def _staleness(run: Run) -> StalenessLedger:
    by_batch = np.zeros((len(run.deliveries), _AGES))
    versions = np.zeros(_AGES)
    for row, delivery in enumerate(run.deliveries):
        for rollout in delivery.rollouts:
            sampled = [s for s in rollout.segments if s.version != NO_VERSION]
            for segment in sampled:
                age = min(max(0, delivery.version - segment.version), _AGES - 1)
                by_batch[row, age] += segment.end - segment.start
            if sampled:
                versions[min(len({s.version for s in sampled}), _AGES) - 1] += 1
    pieces = np.array_split(np.arange(len(run.deliveries)), min(_BATCH_BARS, len(by_batch)) or 1)
    sums = np.array([by_batch[piece].sum(axis=0) for piece in pieces])
    return StalenessLedger(
        tokens_by_age=_normal(by_batch.sum(axis=0)),
        responses_by_versions=_normal(versions),
        batches=[int(piece[0]) for piece in pieces if piece.size],
        by_batch=np.array([_normal(row) for row in sums]).T.tolist() if len(by_batch) else [],
    )


def _normal(counts: NDArray[np.float64]) -> list[float]:
    total = float(counts.sum()) or 1.0
    return [_figure(count / total) for count in counts]


def _alignment(run: Run) -> AlignmentFigures | None:
    """The summary's own, with its batches thinned."""
    found = run.summary.alignment
    if found is None:
        return None
    shown = found.by_batch[_thinning(len(found.by_batch), _CURVE_POINTS)]
    return replace(found, by_batch=shown)


# --- numbers -------------------------------------------------------------------------------------


def _thinned(values: NDArray[np.float64], at_most: int) -> NDArray[np.float64]:
    return values[_thinning(values.size, at_most)]


def _thinning(count: int, at_most: int) -> slice:
    """Which of `count` values are shown: at most so many, at equal distances."""
    return slice(None, None, max(1, -(-count // at_most)))


def _rounded(values: Sequence[float] | NDArray[np.float64]) -> list[float]:
    return [_figure(value) for value in values]


def _figure(value: float) -> float:
    """Round to seven digits, which are more than a screen shows."""
    return float(f"{float(value):.7g}")
