"""Writes the page of a report: one file that needs no other file and no network.

Invariants: the page's own policy (Content-Security-Policy) allows no request, and no script except
ours, whose hashes it names. Everything that comes from a run folder is text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aprilsched.analysis.report import alignment_charts, batch_charts, sections, time_charts
from aprilsched.analysis.report.compare import differences, verdict
from aprilsched.analysis.report.figure import Chart
from aprilsched.analysis.report.gather import report_data
from aprilsched.analysis.report.report_data import ReportData
from aprilsched.extras import extra
from aprilsched.telemetry.run_folder import REPORT, write_whole

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["figures_json", "page", "write_report"]


def write_report(
    folder: Path, other: Path | None = None, *, out: Path | None = None
) -> tuple[Path, list[ReportData]]:
    """Write the report of the run in `folder` to `out` (by default report.html in `folder`), side
    by side with the run in `other` if given.

    Returns the path of the page, and the figures.

    Raises:
        MissingExtra: if plotly or jinja2 is missing.
        RunFolderError: if a run cannot be read or the page cannot be written.
    """
    library = _plotly()
    runs = [report_data(path) for path in (folder, other) if path is not None]
    target = folder / REPORT if out is None else out
    write_whole(target, page(runs, library=library).encode("utf-8", "replace"))
    return target, runs


def figures_json(runs: Sequence[ReportData]) -> bytes:
    """The figures of one run as an object, or of several as a list of them."""
    return msgspec.json.encode(_figures(runs))


def _figures(runs: Sequence[ReportData]) -> ReportData | list[ReportData]:
    return runs[0] if len(runs) == 1 else list(runs)


def page(runs: Sequence[ReportData], *, library: str) -> str:
    """The page of one or two runs; `library` is plotly.js."""
    charts = _charts(runs)
    script = _asset("report.js")
    return (
        _templates()
        .get_template("page.html")
        .render(
            runs=runs,
            title=", ".join(time_charts.label(place, runs) for place in range(len(runs))),
            verdict=_verdict(runs),
            charts=charts,
            specs=[
                {"id": c.id, "data": c.data, "layout": c.layout, "title": c.title}
                for group in charts.values()
                for c in group
            ],
            figures=_figures(runs),
            differences=differences(runs[0], runs[1]) if len(runs) > 1 else [],
            parts=sections.part_rows(runs),
            engine_time=sections.engine_time(runs),
            bias_rows=sections.bias_rows,
            faults_that_happened=sections.faults_that_happened,
            fault_tables=sections.fault_tables,
            style=_asset("report.css"),
            hashes=f"{_hash(library)} {_hash(script)}",
            library=library,
            script=script,
        )
    )


def _charts(runs: Sequence[ReportData]) -> dict[str, list[Chart]]:
    """The charts by their place in the page."""
    end = max(run.time.wall for run in runs)
    each = list(zip(["", "-b"], runs, strict=False))
    forecasts = [
        batch_charts.forecasts(run, "the" if len(runs) == 1 else f"{'AB'[x == '-b']}'s", x)
        for x, run in each
    ]
    return {
        "losses": [time_charts.losses(runs)],
        "over_time": [time_charts.utilization(run, end, x) for x, run in each],
        "gpu": [time_charts.gpu(run, end, x) for x, run in each if run.gpu],
        "engines": [time_charts.engine_timeline(run, x) for x, run in each],
        "responses": [time_charts.responses(run, x) for x, run in each],
        "forecasts": [chart for chart in forecasts if chart is not None],
        "lengths": [batch_charts.lengths(runs)],
        "ages": [batch_charts.ages(runs), batch_charts.versions(runs)],
        "batches": [batch_charts.ages_by_batch(run, x) for x, run in each],
        "bias": [
            batch_charts.bias(runs),
            *batch_charts.distances(runs),
            batch_charts.deciles(runs),
        ],
        **_alignment(runs, each),
    }


def _alignment(
    runs: Sequence[ReportData], each: Sequence[tuple[str, ReportData]]
) -> dict[str, list[Chart]]:
    """Charts of the runs whose trainer reported its log-probabilities."""
    if all(run.alignment is None for run in runs):
        return {"alignment": [], "alignment_engines": []}
    return {
        "alignment": [alignment_charts.by_staleness(runs), alignment_charts.by_position(runs)],
        "alignment_engines": [
            alignment_charts.by_engine(run, x) for x, run in each if run.alignment is not None
        ],
    }


def _verdict(runs: Sequence[ReportData]) -> str:
    if len(runs) > 1:
        return verdict(runs[0], runs[1])
    run = runs[0]
    rate = run.headline("delivered_tokens_per_s").text
    lost = time_charts.losses(runs).title
    return f"{rate} tokens per second reached the trainer. {lost}"


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _asset(name: str) -> str:
    return (files("aprilsched.analysis.report") / "assets" / name).read_text(encoding="utf-8")


def _templates() -> Environment:
    with extra("report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    templates = Environment(
        loader=PackageLoader("aprilsched.analysis.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_function"] = _json
    templates.policies["json.dumps_kwargs"] = {}
    return templates


def _json(content: object) -> str:
    return msgspec.json.encode(content).decode("utf-8", "replace")


def _plotly() -> str:
    with extra("report"):
        from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]
    return get_plotlyjs()
