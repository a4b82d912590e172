"""Makes the tables that commands print at the end; a figure of None is printed as a dash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.simulation import FrontierPoint
from aprilsched.simulation.side_by_side import spread_of_steps


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


def comparison_table(summaries: Mapping[str, RunSummary]) -> Table:
    """Return a table with one row per policy, for the steady state."""
    burn_in = max((s.steady_state.burn_in for s in summaries.values()), default=0)
    table = Table(title=f"steady state, after the first {burn_in} batches")
    table.add_column("policy", overflow="fold")
    for name in (
        "tokens/s",
        "efficiency",
        "off-policy",
        "age, oldest",
        "step, s",
        "p10 to p90",
    ):
        # A spread on two lines would look like two figures.
        table.add_column(name, justify="right", no_wrap=name == "p10 to p90")
    for policy, summary in summaries.items():
        steady, spread = summary.steady_state, spread_of_steps(summary)
        steps = summary.steady_steps_s
        table.add_row(
            policy,
            number(steady.delivered_tokens_per_s),
            percent(steady.efficiency),
            percent(steady.off_policy_token_share),
            f"{number(steady.staleness_mean, 2)}, {steady.staleness_max}",
            number(sum(steps) / len(steps) if steps else None, 1),
            "-" if spread is None else f"{spread[0]:.1f} to {spread[1]:.1f}",
        )
    return table


def frontier_table(points: Sequence[FrontierPoint]) -> Table:
    """Return a table with one row per arm."""
    seeds = points[0].seeds
    more = f", means of {seeds} seeds ± half the range" if seeds > 1 else ""

    def ranged(mean: float, limits: tuple[float, float], digits: int) -> str:
        half = f" ± {number((limits[1] - limits[0]) / 2, digits)}" if seeds > 1 else ""
        return number(mean, digits) + half

    table = Table("arm", title=f"steady state{more}")
    for name in ("tokens/s", "age", "oldest", "off-policy", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in points:
        table.add_row(
            point.arm,
            ranged(point.tokens_per_s, point.tokens_per_s_range, 0),
            ranged(point.age, point.age_range, 2),
            number(point.oldest),
            percent(point.off_policy_share),
            percent(point.efficiency),
        )
    return table
