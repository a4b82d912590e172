"""The alignment ledger: how far the trainer's log-probabilities are from the engines'.

Every figure except `by_staleness` covers tokens of staleness 0, for which engine and trainer used
the same weights. Their difference d (trainer minus engine, in nats) is therefore a mismatch of the
two programs. Importance ratios contain this mismatch, so a loss and its metrics show it as if it
were off-policyness.
"""

from __future__ import annotations

from collections.abc import Iterable

from aprilsched.kernel.core.messages.events import LogprobComparison, LogprobDifferences
from aprilsched.kernel.core.messages.facts import LogprobsCompared
from aprilsched.observe.figures.run_figures import AlignmentFigures, DifferenceFigures


class AlignmentLedger:
    """Collects the reports of a run. Only the first report of a batch counts: a later one may
    follow training steps on the same batch."""

    def __init__(self) -> None:
        self._reports: dict[int, LogprobComparison] = {}
        """By batch."""

    def take(self, fact: LogprobsCompared) -> None:
        self._reports.setdefault(fact.comparison.batch, fact.comparison)

    def figures(self) -> AlignmentFigures | None:
        """Return the figures so far, or None without a report."""
        if not self._reports:
            return None
        return alignment_of([report for _, report in sorted(self._reports.items())])


def alignment_of(reports: list[LogprobComparison]) -> AlignmentFigures:
    """Return the figures of `reports`, at least one."""
    engines = sorted({name for report in reports for name in report.by_engine})
    return AlignmentFigures(
        bound=reports[0].bound,
        whole=_figures(_sum(each for report in reports for each in report.by_engine.values())),
        skipped=sum(report.skipped for report in reports),
        not_finite=sum(report.not_finite for report in reports),
        by_engine={
            name: _figures(_sum(r.by_engine[name] for r in reports if name in r.by_engine))
            for name in engines
        },
        by_position=_by_place([report.by_position for report in reports]),
        by_staleness=_by_place([report.by_staleness for report in reports]),
        by_batch={report.batch: _figures(_sum(report.by_engine.values())) for report in reports},
    )


def _by_place(rows: list[tuple[LogprobDifferences, ...]]) -> list[DifferenceFigures]:
    longest = max(map(len, rows))
    return [_figures(_sum(row[i] for row in rows if i < len(row))) for i in range(longest)]


def _sum(parts: Iterable[LogprobDifferences]) -> LogprobDifferences:
    parts = list(parts)
    return LogprobDifferences(
        tokens=sum(part.tokens for part in parts),
        total=sum(part.total for part in parts),
        k3=sum(part.k3 for part in parts),
        largest=max((part.largest for part in parts), default=0.0),
        beyond=sum(part.beyond for part in parts),
    )


def _figures(found: LogprobDifferences) -> DifferenceFigures:
    tokens = found.tokens
    return DifferenceFigures(
        tokens=tokens,
        mean=found.total / tokens if tokens else None,
        k3=found.k3 / tokens if tokens else None,
        largest=found.largest if tokens else None,
        beyond_share=found.beyond / tokens if tokens else None,
    )
