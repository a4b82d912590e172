"""The page: one file that needs nothing else, and asks nobody for anything.

Invariants: the page's own policy (Content-Security-Policy) lets no request out and runs no script
but ours, whose hashes it names; what comes from a run folder is text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import msgspec

from aprilsched.analysis.report import batch_charts, sections, time_charts
from aprilsched.analysis.report.compare import verdict
from aprilsched.analysis.report.figure import Chart
from aprilsched.analysis.report.gather import report_data
from aprilsched.analysis.report.model import ReportData
from aprilsched.extras import extra
from aprilsched.telemetry.run_folder import REPORT, write_whole

__all__ = ["figures_json", "page", "write_report"]


def write_report(
    folder: Path, other: Path | None = None, *, out: Path | None = None
) -> tuple[Path, list[ReportData]]:
    """Write the report of the run in `folder`, beside that of `other` if given, to `out`
    (report.html in `folder`); where it is, and the figures.

    Raises:
        MissingExtra: if plotly is missing.
        RunFolderError: if a run cannot be read or the page cannot be written.
    """
    library = _plotly()
    runs = [report_data(path) for path in (folder, other) if path is not None]
    target = folder / REPORT if out is None else out
    write_whole(target, page(runs, library=library).encode("utf-8", "replace"))
    return target, runs


def figures_json(runs: Sequence[ReportData]) -> bytes:
    """The figures of one run as an object, or of several as a list of them."""
    return msgspec.json.encode(runs[0] if len(runs) == 1 else list(runs))


def page(runs: Sequence[ReportData], *, library: str) -> str:
    """The page of one run, or of two; `library` is plotly.js."""
    charts = _charts(runs)
    script = _asset("report.js")
    specs = [
        {"id": c.id, "data": c.data, "layout": c.layout, "title": c.title}
        for group in charts.values()
        for c in group
    ]
    return Template(_asset("page.html")).substitute(
        hashes=f"{_hash(library)} {_hash(script)}",
        style=_asset("report.css"),
        title=escape(", ".join(time_charts.label(place, runs) for place in range(len(runs)))),
        verdict=escape(_verdict(runs)),
        what_ran=sections.what_ran(runs),
        headlines=_headlines(runs),
        charts_json=_inert(msgspec.json.encode(specs)),
        figures_json=_inert(figures_json(runs)),
        parts=sections.parts(runs),
        bias_ledger=sections.bias_ledger(runs),
        fault_ledger=sections.fault_ledger(runs),
        version=escape(runs[0].version),
        library=library,
        script=script,
        **{name: _figures(group) for name, group in charts.items()},
    )


def _charts(runs: Sequence[ReportData]) -> dict[str, list[Chart]]:
    """By the place in the page where they stand."""
    end = max(run.time.wall for run in runs)
    each = list(zip(["", "-b"], runs, strict=False))
    return {
        "losses": [time_charts.losses(runs)],
        "over_time": [time_charts.utilization(run, end, x) for x, run in each],
        "gpu": [time_charts.gpu(run, end, x) for x, run in each if run.gpu],
        "engines": [time_charts.engine_timeline(run, x) for x, run in each],
        "responses": [time_charts.responses(run, x) for x, run in each],
        "lengths": [batch_charts.lengths(runs)],
        "ages": [batch_charts.ages(runs), batch_charts.versions(runs)],
        "batches": [batch_charts.ages_by_batch(run, x) for x, run in each],
        "bias": [batch_charts.bias(runs), batch_charts.deciles(runs)],
    }


def _figures(charts: Sequence[Chart]) -> str:
    """Two stand side by side where there is room."""
    drawn = [
        f"<div>{sections.letter(place, chart.of)}{sections.figure(chart)}</div>"
        for place, chart in enumerate(charts)
    ]
    if len(charts) < 2:
        return "".join(map(sections.figure, charts))
    return f"<div class=pair>{''.join(drawn)}</div>"


def _headlines(runs: Sequence[ReportData]) -> str:
    if len(runs) == 1:
        return sections.cards(runs[0].headlines)
    return sections.comparison(runs[0], runs[1])


def _verdict(runs: Sequence[ReportData]) -> str:
    if len(runs) > 1:
        return verdict(runs[0], runs[1])
    run = runs[0]
    rate = run.headline("delivered_tokens_per_s").text
    lost = time_charts.losses(runs).title
    return f"{rate} tokens per second reached the trainer. {lost}"


def _inert(content: bytes) -> str:
    """JSON that no HTML parser takes for anything else."""
    text = content.decode("utf-8", "replace")
    for character in "<>&\N{LINE SEPARATOR}\N{PARAGRAPH SEPARATOR}":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _asset(name: str) -> str:
    return (files("aprilsched.analysis.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    with extra("report"):
        from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs]
    return get_plotlyjs()
