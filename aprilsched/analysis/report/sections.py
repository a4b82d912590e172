"""The text of the page's tables. Their markup is in ``assets/parts.html``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aprilsched.analysis.colours import PART_COLOURS
from aprilsched.analysis.report.report_data import FaultLedger, ReportData
from aprilsched.analysis.report.words import amount, percent, seconds, signed_percent

__all__ = [
    "PartRow",
    "bias_rows",
    "engine_time",
    "fault_tables",
    "faults_that_happened",
    "part_rows",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRow:
    """One part of the engines' time; `each` has its share and its seconds in each run."""

    label: str
    meaning: str
    colour: str
    each: list[tuple[str, str]]


def part_rows(runs: Sequence[ReportData]) -> list[PartRow]:
    """The parts of the engines' time that occurred in any of the runs."""
    return [
        PartRow(
            label=mine.label,
            meaning=mine.meaning,
            colour=PART_COLOURS[mine.part],
            each=[
                (f"{letter}{percent(run.time.parts[i].share)}", seconds(run.time.parts[i].seconds))
                for letter, run in zip(_letters(runs), runs, strict=True)
            ],
        )
        for i, mine in enumerate(runs[0].time.parts)
        if any(run.time.parts[i].seconds > 0 for run in runs)
    ]


def engine_time(runs: Sequence[ReportData]) -> str:
    """The whole time of the engines of each run."""
    return " and ".join(
        f"{letter}{seconds(sum(part.seconds for part in run.time.parts))} of "
        f"{run.time.engines:,} {'engine' if run.time.engines == 1 else 'engines'}"
        for letter, run in zip(_letters(runs), runs, strict=True)
    )


def bias_rows(run: ReportData) -> list[tuple[str, str]]:
    """The causes that change the lengths, and the size of their effect."""
    bias = run.bias
    rows = [
        ("first batch against the later ones", signed_percent(bias.first_batch_length_bias)),
        ("everything delivered so far", signed_percent(bias.bias_estimate)),
    ]
    if bias.transient is not None:
        rows.append(
            ("of it, because of what is in flight", signed_percent(bias.transient.predicted))
        )
    if bias.in_flight is not None:
        flight = bias.in_flight
        rows.append(
            (
                f"in flight at the end: {flight.rollouts:,} responses of expected mean length",
                f"{amount(flight.expected_mean_length)} tokens",
            )
        )
    for reason, drops in bias.censoring.by_reason.items():
        rows.append((f"dropped ({reason}): {drops.rollouts:,}", signed_percent(drops.effect)))
    if not bias.censoring.by_reason:
        rows.append(("dropped responses, which would bend it for good", "none"))
    return rows


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


def _letters(runs: Sequence[ReportData]) -> list[str]:
    return ["A ", "B "] if len(runs) > 1 else [""]
