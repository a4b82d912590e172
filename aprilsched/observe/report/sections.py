"""The sections of a page about one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.observe.figures.rollout_time import ROLLOUT_PART_LABELS
from aprilsched.observe.report.chart_model import PART_COLOURS
from aprilsched.observe.report.report_data import FaultLedger, RunReport
from aprilsched.observe.report.words import amount, percent, seconds, signed_percent

if TYPE_CHECKING:
    pass


# The text of the page's tables. Their markup is in ``assets/parts.html``.


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRow:
    """One part of the engines' time; `each` has its share and its seconds in each run."""

    label: str
    meaning: str
    colour: str
    each: list[tuple[str, str]]


def part_rows(runs: Sequence[RunReport]) -> list[PartRow]:
    """Return the parts of the engines' time that occurred in any of the runs."""
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
    """Return the whole time of the engines of each run."""
    phrases: list[str] = []
    for run in runs:
        time = run.figures.time
        engines = f"{time.engines:,} {'engine' if time.engines == 1 else 'engines'}"
        whole = seconds(sum(part.seconds for part in time.parts))
        phrases.append(f"{run.letter} {whole} of {engines}".lstrip())
    return " and ".join(phrases)


_ENDS = {
    "delivered": "delivered",
    Reason.EPISODE_FAILED.value: "failed, with their group",
    Reason.MEMBER_LOST.value: "lost, their group goes on",
}
"""Labels of the ends of episodes, by the ledger's reasons; others keep the ledger's name."""


def bias_rows(run: RunReport) -> list[tuple[str, str]]:
    """Return the causes that change the lengths, and the size of their effect."""
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
    lines = [("turns, mean", f"{summary.turns_mean:.1f}")]
    if summary.branches is not None:
        lines.append(("branches of sessions, the first ones included", amount(summary.branches)))
    if summary.drift_tokens is not None:
        lines.append(
            ("tokens that would be others if tokenised again", amount(summary.drift_tokens))
        )
    lines += [(f"mean time {ROLLOUT_PART_LABELS[part]}", seconds(spent))
             for part, spent in summary.rollout_seconds.items() if spent]  # fmt: skip
    ends = {"delivered": summary.rollouts.delivered, **summary.rollouts.dropped}
    return lines + [(_ENDS.get(end, end), amount(count)) for end, count in ends.items()]


def faults_that_happened(ledger: FaultLedger) -> str:
    """Return the kinds of faults with their counts; empty if there were none."""
    phrases = [
        (ledger.engines_lost, "engine lost", "engines lost"),
        (ledger.engines_admitted, "taken in again", "taken in again"),
        (ledger.failed_attempts, "request failed and was retried or given up",
         "requests failed and were retried or given up"),
        (ledger.dropped_groups, "group dropped", "groups dropped"),
        (ledger.resumed, "new process", "new processes"),
    ]  # fmt: skip
    return ", ".join(f"{n:,} {one if n == 1 else many}" for n, one, many in phrases if n)


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
