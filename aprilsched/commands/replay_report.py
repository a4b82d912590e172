"""What a replay found: its figures as one object, and as a table with a few sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from aprilsched.analysis.costs_of_run import RecordedCosts
from aprilsched.analysis.lengths_of_run import RecordedRun
from aprilsched.analysis.prediction import PredictionError
from aprilsched.commands.comparison import PolicyRow, compare
from aprilsched.commands.tables import number, percent, signed_percent
from aprilsched.commands.variants import RECORDED
from aprilsched.telemetry.figures import RunSummary

__all__ = ["ReplayReport", "report", "show"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """What ``aprilsched replay --json`` prints.

    Rows are those of ``simulate``, but for `speedup`: delivered tokens/s over those of the replay
    under the run's own settings.
    """

    schema: int = 1
    recorded: PolicyRow
    """The run as it was, its rates and shares over the batches that its replay has too."""
    replayed: list[PolicyRow]
    """The run's own settings first."""
    prediction_error: PredictionError
    imputed: int
    """Responses that had not finished, whose lengths were drawn."""
    known: int
    costs: RecordedCosts
    batches_wanted: int
    """A replay has fewer if it needed more groups than were recorded."""


def report(
    record: RecordedRun,
    real: RunSummary,
    summaries: Mapping[str, RunSummary],
    *,
    error: PredictionError,
    wanted: int,
    generated: Mapping[str, float | None],
    schedules: Mapping[str, str],
) -> ReplayReport:
    """`real` is the run's own summary, `summaries` those of its replays, its own settings' first;
    `generated` and `schedules` are as in :func:`~aprilsched.commands.comparison.compare`."""
    rows = compare(summaries, generated, schedules).policies
    own = compare({RECORDED: real}, {RECORDED: None}, {}).policies[0]
    base = rows[0].delivered_tokens_per_s
    return ReplayReport(
        recorded=own,
        replayed=[replace(row, speedup=_over(row.delivered_tokens_per_s, base)) for row in rows],
        prediction_error=error,
        imputed=record.imputed,
        known=record.known,
        costs=record.costs,
        batches_wanted=wanted,
    )


def show(found: ReplayReport, what: Mapping[str, str]) -> None:
    """Print it; `what` says what each policy does."""
    console = Console(highlight=False)
    console.print(_table(found))
    sentences = [_error(found), _lengths(found), _costs(found.costs)]
    sentences += [_policy(row, what[row.policy]) for row in found.replayed[1:]]
    sentences += [
        _short(row, found) for row in found.replayed if row.batches < found.batches_wanted
    ]
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def _table(found: ReplayReport) -> Table:
    burn_in = found.prediction_error.burn_in
    table = Table("policy", title=f"steady state, after the first {burn_in} batches")
    columns = (
        "delivered tokens/s",
        "efficiency",
        "off-policy tokens",
        "seconds a batch",
        "against the replayed run",
    )
    for name in columns:
        table.add_column(name, justify="right")
    rows = [("the run", found.recorded), *((row.policy, row) for row in found.replayed)]
    for name, row in rows:
        table.add_row(
            name,
            number(row.delivered_tokens_per_s),
            percent(row.efficiency),
            percent(row.off_policy_share),
            number(row.seconds_a_batch, 1),
            signed_percent(None if row.speedup is None else row.speedup - 1),
        )
    return table


def _error(found: ReplayReport) -> str:
    error = found.prediction_error
    if not error.batches:
        return "Prediction error: unknown, no batch is left after the burn-in; lower --burn-in."
    return (
        f"Prediction error, replayed against real over {error.batches} batches: tokens/s "
        f"{_exact(error.delivered_tokens_per_s)}, efficiency {_exact(error.efficiency)}, "
        f"off-policy share {_exact(error.off_policy_share)}, seconds a batch "
        f"{_exact(error.seconds_a_batch)}."
    )


def _lengths(found: ReplayReport) -> str:
    total = found.known + found.imputed
    return (
        f"Lengths: {found.known:,} of {total:,} responses are known; {found.imputed:,} had not "
        "finished and were imputed."
    )


def _costs(costs: RecordedCosts) -> str:
    return (
        f"Medians of the log: trainer {costs.train_seconds:.3g} s, refit {costs.refit_seconds:.3g} "
        f"s, pause {1e3 * costs.pause_seconds:.3g} ms, reward {costs.reward_seconds:.3g} s."
    )


def _policy(row: PolicyRow, what: str) -> str:
    text = f"{row.policy}: {what}"
    return f"{text} It chose {row.schedule}." if row.schedule else text


def _short(row: PolicyRow, found: ReplayReport) -> str:
    return (
        f"{row.policy} needed more groups than were recorded: it has {row.batches} of "
        f"{found.batches_wanted} batches."
    )


def _over(rate: float | None, base: float | None) -> float | None:
    return rate / base if rate is not None and base else None


def _exact(error: float | None) -> str:
    return "unknown" if error is None else f"{error:+z.2%}"
