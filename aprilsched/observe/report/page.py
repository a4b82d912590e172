"""Writes the page of a report: one file that needs no other file and no network.

Invariants: the page's own policy (Content-Security-Policy) allows no request, and no script except
ours, whose hashes it names. Everything that comes from a run folder is text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.kernel.values.extras import extra
from aprilsched.observe.figures.rollout_time import ROLLOUT_PART_LABELS
from aprilsched.observe.log.run_folder import REPORT, write_whole
from aprilsched.observe.report import charts
from aprilsched.observe.report.chart_model import PART_COLOURS, Chart
from aprilsched.observe.report.gather import run_report
from aprilsched.observe.report.report_data import FaultLedger, Headline, ReportData, RunReport
from aprilsched.observe.report.words import amount, percent, seconds, signed_percent

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
    """The figures of one run as an object, or of several as a list of them."""
    return msgspec.json.encode(_alone(runs))


def _alone(runs: Sequence[ReportData]) -> ReportData | Sequence[ReportData]:
    return runs[0] if len(runs) == 1 else runs


def page(runs: Sequence[RunReport], *, library: str) -> str:
    """The page of one or two runs; `library` is plotly.js."""
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
            parts=part_rows(runs),
            engine_time=engine_time(runs),
            bias_rows=bias_rows,
            episode_rows=episode_rows,
            faults_that_happened=faults_that_happened,
            fault_tables=fault_tables,
            style=_asset("report.css"),
            hashes=f"{_hash(library)} {_hash(script)}",
            library=library,
            script=script,
        )
    )


def _charts(runs: Sequence[RunReport]) -> dict[str, list[Chart]]:
    """The charts by their place in the page."""
    end = max(run.usage.wall for run in runs)
    reported = [(run, found) for run in runs if (found := run.summary.alignment)]
    return {
        "losses": [charts.losses(runs)],
        "over_time": [charts.utilization(run, end) for run in runs],
        "gpu": [charts.gpu(run, end) for run in runs if run.gpu],
        "engines": [charts.engine_timeline(run) for run in runs],
        "responses": [charts.responses(run) for run in runs],
        "forecasts": [chart for run in runs if (chart := charts.forecasts(run))],
        "episodes": [charts.rollout_time(runs)] if any(run.episodes for run in runs) else [],
        "lengths": [charts.lengths(runs)],
        "ages": [charts.ages_by_batch(run) for run in runs],
        "bias": [charts.bias(runs), *charts.distances(runs), charts.deciles(runs)],
        "alignment": [charts.by_staleness(runs), charts.by_position(runs)] if reported else [],
        "alignment_engines": [charts.by_engine(run, found) for run, found in reported],
    }


def _verdict(runs: Sequence[RunReport]) -> str:
    if len(runs) > 1:
        return verdict(*(run.figures for run in runs))
    rate = runs[0].figures.headline("delivered_tokens_per_s").text
    return f"{rate} tokens per second reached the trainer. {charts.losses(runs).title}"


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


# --- sections ------------------------------------------------------------------------------------

# The text of the page's tables. Their markup is in ``assets/parts.html``.


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRow:
    """One part of the engines' time; `each` has its share and its seconds in each run."""

    label: str
    meaning: str
    colour: str
    each: list[tuple[str, str]]


def part_rows(runs: Sequence[RunReport]) -> list[PartRow]:
    """The parts of the engines' time that occurred in any of the runs."""
    return [
        PartRow(
            label=each[0].label,
            meaning=each[0].meaning,
            colour=PART_COLOURS[each[0].part],
            each=[
                (f"{run.letter} {percent(part.share)}".lstrip(), seconds(part.seconds))
                for run, part in zip(runs, each, strict=True)
            ],
        )
        for each in zip(*(run.figures.time.parts for run in runs), strict=True)
        if any(part.seconds > 0 for part in each)
    ]


def engine_time(runs: Sequence[RunReport]) -> str:
    """The whole time of the engines of each run."""
    said: list[str] = []
    for run in runs:
        time = run.figures.time
        engines = f"{time.engines:,} {'engine' if time.engines == 1 else 'engines'}"
        whole = seconds(sum(part.seconds for part in time.parts))
        said.append(f"{run.letter} {whole} of {engines}".lstrip())
    return " and ".join(said)


_ENDS = {
    "delivered": "delivered",
    Reason.EPISODE_FAILED.value: "failed, with their group",
    Reason.MEMBER_LOST.value: "lost, their group goes on",
}
"""How episodes end, by the ledger's reasons; others are told as the ledger names them."""


def bias_rows(run: RunReport) -> list[tuple[str, str]]:
    """The causes that change the lengths, and the size of their effect."""
    summary, bias = run.summary, run.summary.bias
    rows = [
        ("first batch against the later ones", signed_percent(bias.first_batch_length_bias)),
        ("everything delivered so far", signed_percent(bias.bias_estimate)),
    ]
    if bias.transient is not None:
        rows.append(
            ("of it, because of what is in flight", signed_percent(bias.transient.predicted))
        )
    for reason, tokens in bias.dropped_tokens.items():
        dropped = summary.rollouts.dropped.get(reason, 0)
        rows.append((f"dropped ({reason}): {dropped:,} responses", f"{amount(tokens)} tokens"))
    if not bias.dropped_tokens:
        rows.append(("dropped responses, which would bias the lengths for good", "none"))
    if bias.censoring.effect is not None:
        rows.append(("lasting effect of drops, at least", signed_percent(bias.censoring.effect)))
    return rows


def episode_rows(run: RunReport) -> list[tuple[str, str]]:
    """What the episodes of a run did, and how they ended."""
    summary = run.summary
    if summary.turns_mean is None:
        return []
    told = [("turns, mean", f"{summary.turns_mean:.1f}")]
    if summary.branches is not None:
        told.append(("branches of sessions, the first ones included", amount(summary.branches)))
    if summary.drift_tokens is not None:
        told.append(
            ("tokens that would be others if tokenised again", amount(summary.drift_tokens))
        )
    told += [(f"mean time {ROLLOUT_PART_LABELS[part]}", seconds(spent))
             for part, spent in summary.rollout_seconds.items() if spent]  # fmt: skip
    ends = {"delivered": summary.rollouts.delivered, **summary.rollouts.dropped}
    return told + [(_ENDS.get(end, end), amount(count)) for end, count in ends.items()]


def faults_that_happened(ledger: FaultLedger) -> str:
    """The kinds of faults with their counts; empty if there were none."""
    said = [
        (ledger.engines_lost, "engine lost", "engines lost"),
        (ledger.engines_admitted, "taken in again", "taken in again"),
        (ledger.failed_attempts, "request failed and was retried or given up",
         "requests failed and were retried or given up"),
        (ledger.dropped_groups, "group dropped", "groups dropped"),
        (ledger.resumed, "new process", "new processes"),
    ]  # fmt: skip
    return ", ".join(f"{n:,} {one if n == 1 else many}" for n, one, many in said if n)


def fault_tables(ledger: FaultLedger) -> list[tuple[Sequence[str], list[tuple[str, ...]]]]:
    """Heading and rows of each table that has rows: events of engines, retries, drops."""
    tables: list[tuple[Sequence[str], list[tuple[str, ...]]]] = [
        (
            ("at", "engine", "what", "cause"),
            [(seconds(e.time), e.engine, e.what, e.cause) for e in ledger.events],
        ),
        (("failed attempts", "cause"), [(f"{r.attempts:,}", r.cause) for r in ledger.retries]),
        (
            ("dropped groups", "responses", "reason", "cause"),
            [(f"{d.groups:,}", f"{d.rollouts:,}", d.reason, d.cause) for d in ledger.drops],
        ),
    ]
    return [(head, rows) for head, rows in tables if rows]


# --- compare -------------------------------------------------------------------------------------

# Compares two runs: each figure of both, the difference, and which is better.

_EQUAL = 0.005
"""A difference below this share of the larger figure counts as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A figure of the runs A and B."""

    label: str
    explanation: str
    a: str
    b: str
    difference: float | None
    """B minus A."""
    difference_text: str
    ratio: float | None
    """B divided by A; None if this ratio says nothing."""
    verdict: Literal["better", "worse", "same", ""]
    """Whether B is better or worse than A; empty if neither value is better."""


def differences(a: ReportData, b: ReportData) -> list[Difference]:
    """The differences of all headline figures that both runs have."""
    # The seconds of different amounts of work cannot be compared.
    unlike = a.headline("rollouts.delivered").value != b.headline("rollouts.delivered").value
    others = {figure.key: figure for figure in b.headlines}
    return [
        _difference(mine, others[mine.key], judged=not (unlike and mine.key == "seconds.wall"))
        for mine in a.headlines
        if mine.key in others
    ]


def verdict(a: ReportData, b: ReportData) -> str:
    """One sentence that says how much faster B is, and at what price."""
    mine, other = (
        a.headline("delivered_tokens_per_s").value,
        b.headline("delivered_tokens_per_s").value,
    )
    stale = [run.headline("off_policy_token_share").value for run in (a, b)]
    price = f"{percent(stale[1])} of B's tokens are off-policy, {percent(stale[0])} of A's."
    if not mine or other is None:
        return f"Speeds cannot be compared. {price}"
    change = other / mine - 1
    if abs(change) < _EQUAL:
        return f"B is as fast as A. {price}"
    faster = "more" if change > 0 else "fewer"
    return f"B delivers {percent(abs(change))} {faster} tokens per second than A. {price}"


def _difference(a: Headline, b: Headline, *, judged: bool) -> Difference:
    known = a.value is not None and b.value is not None
    change = (b.value or 0.0) - (a.value or 0.0) if known else None
    return Difference(
        label=a.label,
        explanation=a.explanation if a.explanation == b.explanation else "",
        a=a.text,
        b=b.text,
        difference=change,
        difference_text=_text(a, change),
        ratio=_ratio(a, b),
        verdict=_better_or_worse(a, b) if judged else "",
    )


def _text(figure: Headline, change: float | None) -> str:
    if change is None:
        return "unknown"
    match figure.unit:
        case "share":
            return f"{signed_percent(change).removesuffix(' %')} points"
        case "versions":
            return _signed(change, 2)
        case "reward":
            return _signed(change, 3)
        case "nats":
            return f"{change:+.2g} nats".replace("-", "\N{MINUS SIGN}", 1)
        case "seconds":
            return f"{_signed(change, 1)} s"
        case _:
            return _signed(change, 0)


def _signed(change: float, digits: int) -> str:
    sign = "+" if change > 0 else "\N{MINUS SIGN}" if change < 0 else ""
    return f"{sign}{amount(abs(change), digits)}"


def _ratio(a: Headline, b: Headline) -> float | None:
    if not a.value or b.value is None or a.better == "zero":
        return None
    return b.value / a.value


def _better_or_worse(a: Headline, b: Headline) -> Literal["better", "worse", "same", ""]:
    if a.better is None or a.value is None or b.value is None:
        return ""
    mine, other = a.value, b.value
    if a.better == "zero":
        mine, other = abs(mine), abs(other)
    if abs(other - mine) <= _EQUAL * max(abs(mine), abs(other)):
        return "same"
    return "better" if (other > mine) == (a.better == "higher") else "worse"
