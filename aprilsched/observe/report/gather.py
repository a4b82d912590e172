"""Computes everything that a report shows from a run folder, in one pass over its event log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aprilsched.observe.figures.engine_time import PART_INDEX, PART_LABELS, PARTS
from aprilsched.observe.figures.faults import Faults
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.log.basis import batch_units_of
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.rebuild import Rebuilding, written_summary
from aprilsched.observe.log.run import History, readable
from aprilsched.observe.log.run_folder import EVENTS, config_in
from aprilsched.observe.log.samples import read_samples
from aprilsched.observe.log.tail import log_end
from aprilsched.observe.log.usage import RunUsage, UsageRecorder, busy_share
from aprilsched.observe.report.report_data import EngineTime, PartTime, ReportData, RunReport
from aprilsched.observe.report.words import headlines, ran
from aprilsched.observe.sampling.labels import NVML_UTILIZATION, STEP_SHARE


def run_report(folder: Path) -> RunReport:
    """Compute the content of a report about the run in `folder`.

    Raises:
        RunFolderError: if a file is missing or cannot be understood.
    """
    with readable(folder):
        config = config_in(folder)
        written = written_summary(folder)
        rebuilding = Rebuilding(config) if written is None else None
        history, faults = History(), Faults()
        recorder = UsageRecorder(batch_units=batch_units_of(config))
        summing = () if rebuilding is None else rebuilding.listeners
        end = replay(folder / EVENTS, [recorder, faults, history, *summing])
    summary = written if rebuilding is None else rebuilding.result(log_end(folder / EVENTS))
    assert summary is not None  # noqa: S101 - it is written or rebuilt
    usage = recorder.usage(end)
    gpu, gpu_label = gpu_lines(folder)
    figures = ReportData(
        name=folder.resolve().name,
        version=version("aprilsched"),
        warnings=_warnings(summary),
        ran=ran(config, summary),
        headlines=headlines(summary, usage.utilization),
        time=_time(usage),
        faults=faults.ledger(),
        summary=replace(summary, per_batch=[]),
    )
    run = history.run(config, summary, end)
    return RunReport(figures=figures, run=run, usage=usage, gpu=gpu, gpu_label=gpu_label)


def _warnings(summary: RunSummary) -> list[str]:
    notes = [summary.error, summary.bias.censoring.warning]
    if summary.event_log_error:
        notes.insert(1, f"The event log is not complete: {summary.event_log_error}.")
    if summary.interrupted:
        notes.insert(0, "The run was ended by Ctrl-C; the figures are those until then.")
    return [text for text in notes if text]


def _time(usage: RunUsage) -> EngineTime:
    totals, shares = usage.seconds.sum(axis=0), usage.shares
    return EngineTime(
        engines=len(usage.engines),
        wall=usage.wall,
        utilization=usage.utilization,
        parts=[
            PartTime(
                part=part,
                label=PART_LABELS[part],
                seconds=float(totals[index]),
                share=shares[part],
                meaning=PARTS[part],
            )
            for part, index in PART_INDEX.items()
        ],
        by_engine={
            name: busy_share(seconds)
            for name, seconds in zip(usage.engines, usage.seconds, strict=True)
        },
    )


_LINES = 16
_POINTS = 240
_Shares = Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]


def gpu_lines(folder: Path) -> tuple[_Shares, str]:
    """Return the samples as shares over time, with a sentence that explains them.

    There is one line per GPU (from NVML), or else one per engine (from its own counters), and none
    if the run was not sampled.

    Raises:
        RunFolderError: if the samples cannot be read.
    """
    samples = read_samples(folder)
    label = STEP_SHARE
    found = {name: (each.t, each.step_share) for name, each in samples.engines.items()}
    if samples.devices:
        label = NVML_UTILIZATION
        found = {
            f"{index}: {gpu.name}": (gpu.t, gpu.utilization)
            for index, gpu in samples.devices.items()
        }
    shown = {
        name: _thinned(t, share) for name, (t, share) in found.items() if np.isfinite(share).any()
    }
    return dict(list(shown.items())[:_LINES]), label if shown else ""


def _thinned(
    times: NDArray[np.float64], share: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the means of neighbouring samples, so that there are no more than a screen shows."""
    known = np.flatnonzero(np.isfinite(share))
    pieces = np.array_split(known, min(_POINTS, known.size))
    means = [np.array([each[piece].mean() for piece in pieces]) for each in (times, share)]
    return means[0], means[1]
