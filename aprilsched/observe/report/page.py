"""Writes the page of a report: one self-contained file that needs no network.

Invariants: the page's own policy (Content-Security-Policy) allows no request, and no script except
ours, whose hashes it names. Everything that comes from a run folder is text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aprilsched.kernel.values.extras import extra
from aprilsched.observe.log.run_folder import REPORT, write_whole
from aprilsched.observe.report import alignment_charts, batch_charts, charts, time_charts
from aprilsched.observe.report.chart_model import PART_COLOURS, Chart
from aprilsched.observe.report.compare import differences, verdict
from aprilsched.observe.report.gather import run_report
from aprilsched.observe.report.report_data import ReportData, RunReport
from aprilsched.observe.report.sections import (
    bias_rows,
    cards,
    episode_rows,
    fault_tables,
    faults_that_happened,
)
from aprilsched.observe.report.words import written

if TYPE_CHECKING:
    from jinja2 import Environment


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
    runs = [run_report(path) for path in (folder, other) if path is not None]
    target = folder / REPORT if out is None else out
    write_whole(target, page(runs, library=library).encode("utf-8", "replace"))
    return target, [run.figures for run in runs]


def figures_json(runs: Sequence[ReportData]) -> bytes:
    """Return the figures of one run as an object, or of several as a list of them."""
    return msgspec.json.encode(_alone(runs))


def _alone(runs: Sequence[ReportData]) -> ReportData | Sequence[ReportData]:
    return runs[0] if len(runs) == 1 else runs


def page(runs: Sequence[RunReport], *, library: str) -> str:
    """Return the page of one or two runs; `library` is plotly.js."""
    if len(runs) > 1:
        runs = [replace(run, letter=letter) for run, letter in zip(runs, "AB", strict=True)]
    by_section = _charts(runs)
    script = _asset("report.js")
    figures = [run.figures for run in runs]
    return (
        _templates()
        .get_template("page.html")
        .render(
            runs=runs,
            title=", ".join(run.label for run in runs),
            verdict=_verdict(runs),
            charts=by_section,
            specs=[charts.spec(chart) for group in by_section.values() for chart in group],
            figures=_alone(figures),
            differences=differences(*figures) if len(figures) > 1 else [],
            parts=[
                parts
                for parts in zip(*(run.figures.time.parts for run in runs), strict=True)
                if any(part.seconds > 0 for part in parts)
            ],
            part_colours=PART_COLOURS,
            written=written,
            bias_rows=bias_rows,
            episode_rows=episode_rows,
            cards=cards,
            faults_that_happened=faults_that_happened,
            fault_tables=fault_tables,
            style=_asset("report.css"),
            hashes=f"{_hash(library)} {_hash(script)}",
            library=library,
            script=script,
        )
    )


def _charts(runs: Sequence[RunReport]) -> dict[str, list[Chart]]:
    """Return the charts by their place in the page."""
    end = max(run.usage.wall for run in runs)
    reported = [(run, found) for run in runs if (found := run.summary.alignment)]
    return {
        "losses": [time_charts.losses(runs)],
        "over_time": [time_charts.utilization(run, end) for run in runs],
        "gpu": [time_charts.gpu(run, end) for run in runs if run.gpu],
        "engines": [time_charts.engine_timeline(run) for run in runs],
        "responses": [time_charts.responses(run) for run in runs],
        "forecasts": [chart for run in runs if (chart := batch_charts.forecasts(run))],
        "episodes": [time_charts.rollout_time(runs)] if any(run.episodes for run in runs) else [],
        "rewards": batch_charts.rewards(runs),
        "lengths": [batch_charts.lengths(runs)],
        "staleness": [batch_charts.staleness_by_batch(run) for run in runs],
        "bias": [batch_charts.bias(runs)],
        "alignment": [alignment_charts.by_staleness(runs), alignment_charts.by_position(runs)]
        if reported
        else [],
        "alignment_engines": [alignment_charts.by_engine(run, found) for run, found in reported],
    }


def _verdict(runs: Sequence[RunReport]) -> str:
    if len(runs) > 1:
        return verdict(*(run.figures for run in runs))
    rate = runs[0].figures.headline("delivered_tokens_per_s").text
    return f"{rate} tokens per second reached the trainer. {time_charts.losses(runs).title}"


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _asset(name: str) -> str:
    return (files("aprilsched.observe.report") / "assets" / name).read_text(encoding="utf-8")


def _templates() -> Environment:
    with extra("report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    templates = Environment(
        loader=PackageLoader("aprilsched.observe.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_marked,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_function"] = _json
    templates.policies["json.dumps_kwargs"] = {}
    return templates


def _marked(value: object) -> object:
    """Return text as markup: what is in backticks is code, and no line ends before a "%"."""
    from jinja2.filters import do_mark_safe

    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    escaped = html.escape(value).replace(" %", "&nbsp;%")
    return do_mark_safe(re.sub("`([^`]*)`", r"<code>\1</code>", escaped).replace("`", "'"))


def _json(content: object) -> str:
    return msgspec.json.encode(content).decode("utf-8", "replace")


def _plotly() -> str:
    with extra("report"):
        from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]
    return get_plotlyjs()
