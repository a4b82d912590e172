"""Computes everything that a report shows from a run folder, in one pass over its event log."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from aprilsched.kernel.values.files import read_text
from aprilsched.observe.figures.engine_time import PART_INDEX, PART_LABELS, PARTS
from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.observe.log.reading import replay
from aprilsched.observe.log.rebuild import Rebuilding, written_summary
from aprilsched.observe.log.run import History, readable
from aprilsched.observe.log.run_folder import CONFIG, EVENTS
from aprilsched.observe.log.usage import RunUsage, UsageRecorder, busy_share
from aprilsched.observe.report.fault_lines import Faults
from aprilsched.observe.report.headlines import headlines
from aprilsched.observe.report.report_data import EngineTime, PartTime, ReportData, RunReport
from aprilsched.observe.report.sampled import gpu_lines
from aprilsched.observe.report.words import ran


def run_report(folder: Path) -> RunReport:
    """Compute the content of a report about the run in `folder`.

    Raises:
        RunFolderError: if a file is missing or cannot be understood.
    """
    with readable(folder):
        config = tomllib.loads(read_text(folder / CONFIG))
        written = written_summary(folder)
        rebuilding = Rebuilding(config) if written is None else None
        history, faults = History(), Faults()
        recorder = UsageRecorder(batch_groups=config.get("scheduler", {}).get("batch_groups"))
        summing = () if rebuilding is None else rebuilding.listeners
        end = replay(folder / EVENTS, [recorder, faults, history, *summing])
    summary = written if rebuilding is None else rebuilding.result()
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
