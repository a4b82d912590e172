"""The rows of a page's tables, whose markup is in ``assets/parts.html``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aprilsched.kernel.core.state.ledger import Reason
from aprilsched.observe.figures.faults import FaultLedger
from aprilsched.observe.figures.rollout_time import ROLLOUT_PART_LABELS
from aprilsched.observe.report.report_data import Headline, RunReport
from aprilsched.observe.report.words import percent, written

_ENDS = {
    "delivered": "delivered",
    Reason.EPISODE_FAILED.value: "failed",
    Reason.MEMBER_LOST.value: "lost, their group continues",
}
"""Labels of the ends of episodes, by the ledger's reasons; others keep the ledger's name."""

CARDS = (
    "delivered_tokens_per_s",
    "efficiency",
    "staleness_mean",
    "off_policy_token_share",
    "bias.bias_estimate",
    "rollouts.dropped",
)
"""The figures that readers look at first; that of staleness has the largest with it."""


def cards(run: RunReport) -> tuple[list[Headline], list[tuple[str, str, str]]]:
    """Return the figures of the cards, and names, values and explanations of the others."""
    found = {name: run.figures.headline(name) for name in CARDS}
    largest, dropped = run.figures.headline("staleness_max"), found["rollouts.dropped"]
    found["staleness_mean"] = replace(
        largest,
        label="Staleness, mean and largest",
        text=f"{found['staleness_mean'].text} / {largest.text}",
    )
    faults = faults_that_happened(run.figures.faults) or "none"
    found["rollouts.dropped"] = replace(
        dropped, explanation=f"{dropped.explanation} All faults: {faults}."
    )
    others = [f for f in run.figures.headlines if f.key not in {*CARDS, "staleness_max"}]
    return list(found.values()), [(f.label, f.text, f.explanation) for f in others]


def bias_rows(run: RunReport) -> list[tuple[str, str]]:
    """Return the causes that change the lengths, and the size of their effect."""
    summary, bias = run.summary, run.summary.bias
    rows = [
        ("first batch against the later ones", percent(bias.first_batch_length_bias, signed=True)),
        ("everything delivered so far", percent(bias.bias_estimate, signed=True)),
    ]
    if bias.transient is not None:
        rows.append(
            ("of it, because of what is in flight", percent(bias.transient.predicted, signed=True))
        )
    if summary.length_distance is not None and summary.iid_length_distance is not None:
        distance = f"{summary.length_distance:.2f}, at random {summary.iid_length_distance:.2f}"
        rows.append(("distance of a batch's lengths from the length distribution, mean", distance))
    for reason, tokens in bias.dropped_tokens.items():
        dropped = summary.rollouts.dropped.get(reason, 0)
        rows.append((f"dropped ({reason}): {dropped:,} responses", f"{written(tokens)} tokens"))
    if not bias.dropped_tokens:
        rows.append(("dropped responses, which would bias the lengths for good", "none"))
    if bias.censoring.effect is not None:
        rows.append(
            ("lasting effect of drops, at least", percent(bias.censoring.effect, signed=True))
        )
    return rows


def episode_rows(run: RunReport) -> list[tuple[str, str]]:
    """What the episodes of a run did, and how they ended."""
    summary = run.summary
    if summary.turns_mean is None:
        return []
    lines = [("turns, mean", f"{summary.turns_mean:.1f}")]
    if summary.branches is not None:
        lines.append(("branches of sessions, the first ones included", written(summary.branches)))
    if summary.drift_tokens is not None:
        lines.append(
            ("tokens that would be others if tokenised again", written(summary.drift_tokens))
        )
    lines += [(f"mean time {ROLLOUT_PART_LABELS[part]}", written(spent, "seconds"))
             for part, spent in summary.rollout_seconds.items() if spent]  # fmt: skip
    ends = {"delivered": summary.rollouts.delivered, **summary.rollouts.dropped}
    return lines + [(_ENDS.get(end, end), written(count)) for end, count in ends.items()]


def faults_that_happened(ledger: FaultLedger) -> str:
    """Return the kinds of faults with their counts; empty if there were none."""
    phrases = [
        (ledger.engines_lost, "engine lost", "engines lost"),
        (ledger.engines_admitted, "taken in again", "taken in again"),
        (ledger.failed_attempts, "request failed and was retried or given up",
         "requests failed and were retried or given up"),
        (ledger.dropped_rollouts, "response dropped", "responses dropped"),
        (ledger.resumed, "new process", "new processes"),
    ]  # fmt: skip
    return ", ".join(f"{n:,} {one if n == 1 else many}" for n, one, many in phrases if n)


def fault_tables(ledger: FaultLedger) -> list[tuple[Sequence[str], list[tuple[str, ...]]]]:
    """Heading and rows of each table that has rows: events of engines, retries, drops."""
    tables: list[tuple[Sequence[str], list[tuple[str, ...]]]] = [
        (
            ("at", "engine", "what", "cause"),
            [(written(e.time, "seconds"), e.engine, e.what, e.cause) for e in ledger.events],
        ),
        (("failed attempts", "cause"), [(f"{r.attempts:,}", r.cause) for r in ledger.retries]),
        (
            ("dropped responses", "reason", "cause"),
            [(f"{d.rollouts:,}", d.reason, d.cause) for d in ledger.drops],
        ),
    ]
    return [(head, rows) for head, rows in tables if rows]
