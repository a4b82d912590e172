"""Makes the tables that commands print at the end; a figure of None is printed as a dash."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.simulation import PolicyRow
from aprilsched.simulation.workload import Limits


def number(value: float | None, digits: int = 0) -> str:
    """Format a number with thousands separators."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Format a share of 1 as a percentage."""
    return "-" if value is None else f"{value:.1%}"


def signed_percent(value: float | None) -> str:
    """Format a difference of two shares of 1 in percent, with its sign."""
    return "-" if value is None else f"{value:+.1%}"


def _pair(forecast: float, outcome: float | None) -> str:
    return f"{percent(forecast)}, {percent(outcome)}"


def run_table(summary: RunSummary) -> Table:
    """Return a table of the figures of one run."""
    rollouts, tokens, steady = summary.rollouts, summary.tokens, summary.steady_state
    drawn = summary.bias.drawn
    table = Table("figure", "value", title="interrupted run" if summary.interrupted else None)
    rows = {
        "batches": number(summary.batches),
        "rollouts delivered / launched": f"{rollouts.delivered:,} / {rollouts.launched:,}",
        "in flight at the end": number(rollouts.in_flight),
        "dropped": number(sum(rollouts.dropped.values())),
        "lost, duplicated": f"{rollouts.lost}, {rollouts.duplicated}",
        "tokens delivered / generated": f"{tokens.delivered:,} / {tokens.generated:,}",
        "recomputed tokens": number(tokens.reprefilled),
        f"seconds ({summary.clock} clock)": number(summary.seconds.wall, 1),
        "delivered tokens/s": number(summary.delivered_tokens_per_s),
        "efficiency": percent(summary.efficiency),
        "off-policy token share": percent(summary.off_policy_token_share),
        "staleness mean, max": f"{number(summary.staleness_mean, 2)}, {summary.staleness_max}",
        "first-batch length bias": signed_percent(summary.bias.first_batch_length_bias),
        "length bias so far": signed_percent(summary.bias.bias_estimate),
        "drawn mean length": number(None if drawn is None else drawn.mean),
        f"tokens/s after {steady.burn_in} batches": number(steady.delivered_tokens_per_s),
        "efficiency after them": percent(steady.efficiency),
    }
    forecast = steady.forecast
    if forecast is not None:
        rows["efficiency: forecast, outcome"] = _pair(
            forecast.efficiency_forecast, forecast.efficiency
        )
        rows["off-policy share: forecast, outcome"] = _pair(
            forecast.off_policy_token_share_forecast, forecast.off_policy_token_share
        )
    if summary.rewards.mean is not None:
        rows["mean reward"] = number(summary.rewards.mean, 3)
    rows |= {f"mean of {name}": number(mean, 3) for name, mean in summary.rewards.parts.items()}
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def comparison_table(
    rows: Sequence[PolicyRow], burn_in: int, limits: Limits | None = None
) -> Table:
    """Return a table with one row per policy, for the steady state."""
    title = f"steady state, after the first {burn_in} batches"
    if limits == "exact":
        title += ", exact limits"
    return _steady_table(rows, "policy", title, "step, s", [number(row.step_s, 1) for row in rows])


def frontier_table(rows: Sequence[PolicyRow]) -> Table:
    """Return a table with one row per arm."""
    efficiency = [percent(row.efficiency) for row in rows]
    return _steady_table(rows, "arm", "steady state", "efficiency", efficiency)


def _steady_table(
    rows: Sequence[PolicyRow], name: str, title: str, last: str, values: Sequence[str]
) -> Table:
    """Return a table of the rows, whose column `last` has these values."""
    if (seeds := rows[0].seeds) > 1:
        title += f", means of {seeds} seeds ± half the range"
    table = Table(name, title=title)
    table.columns[0].overflow = "fold"
    for column in ("tokens/s", "staleness", "oldest", "off-\npolicy", last):
        table.add_column(column, justify="right", no_wrap=True)
    for row, value in zip(rows, values, strict=True):
        table.add_row(
            row.policy,
            _ranged(row.delivered_tokens_per_s, row.delivered_tokens_per_s_range, 0),
            _ranged(row.staleness_mean, row.staleness_mean_range, 2),
            number(row.staleness_max),
            percent(row.off_policy_share),
            value,
        )
    return table


def point_line(row: PolicyRow) -> str:
    """Return a line about a policy whose runs have ended."""
    speed, staleness = number(row.delivered_tokens_per_s), number(row.staleness_mean, 2)
    return f"{row.policy}: {speed} tokens/s at a mean staleness of {staleness}"


def _ranged(mean: float | None, limits: tuple[float, float] | None, digits: int) -> str:
    half = "" if limits is None else f" ± {number((limits[1] - limits[0]) / 2, digits)}"
    return number(mean, digits) + half
