"""Makes the tables that the commands print at their end; a figure that is None is a dash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from aprilsched.runs.policies import Policy
from aprilsched.runs.simulated import Outcome
from aprilsched.telemetry.figures import RunSummary


def number(value: float | None, digits: int = 0) -> str:
    """A number with thousands separators."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """A share of 1 in percent."""
    return "-" if value is None else f"{value:.1%}"


def signed_percent(value: float | None) -> str:
    """A difference of two shares of 1 in percent, with its sign."""
    return "-" if value is None else f"{value:+.1%}"


def _pair(forecast: float, outcome: float | None) -> str:
    return f"{percent(forecast)}, {percent(outcome)}"


def run_table(summary: RunSummary) -> Table:
    """A table of the figures of one run."""
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


def spread_of_steps(summary: RunSummary) -> tuple[float, float] | None:
    """The 10th and the 90th percentile of the seconds of a batch in the steady state; None without
    such batches."""
    kept = [batch.seconds for batch in summary.per_batch[summary.steady_state.burn_in :]]
    if not kept:
        return None
    low, high = np.percentile(kept, [10, 90])
    return float(low), float(high)


def comparison_table(summaries: Mapping[str, RunSummary]) -> Table:
    """A table with one row for each policy. All figures except the first batch's bias are those of
    the steady state."""
    burn_in = max((s.steady_state.burn_in for s in summaries.values()), default=0)
    table = Table(title=f"steady state, after the first {burn_in} batches")
    table.add_column("policy")
    for name in (
        "tokens/s",
        "efficiency",
        "off-policy",
        "seconds a batch",
        "p10 to p90",
        "first-batch bias",
    ):
        # A spread of two lines would be read as two figures.
        table.add_column(name, justify="right", no_wrap=name == "p10 to p90")
    for policy, summary in summaries.items():
        steady, spread = summary.steady_state, spread_of_steps(summary)
        table.add_row(
            policy,
            number(steady.delivered_tokens_per_s),
            percent(steady.efficiency),
            percent(steady.off_policy_token_share),
            number(steady.mean_batch_seconds, 1),
            "-" if spread is None else f"{spread[0]:.1f} to {spread[1]:.1f}",
            signed_percent(summary.bias.first_batch_length_bias),
        )
    return table


# --- comparison ----------------------------------------------------------------------------------

# Compares the runs of several policies, for comparison.json and for one summary sentence.

BASELINE = "sync"

_FLAT = 0.01
"""The best policy is the least stale one among those whose efficiency is at most this share below
the highest, as automatic scheduling chooses. Optima are flat, so such a difference is of no use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRow:
    """The figures of one policy. A figure that cannot be known is None.

    Rates, efficiency and shares are those of the steady state, after the burn-in. All other figures
    are those of the whole run.
    """

    policy: str
    efficiency: float | None
    """T_bound / T: the least possible time for the delivered tokens, divided by the actual time."""
    delivered_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    """All tokens that the engines generated, including those still in flight at the end."""
    off_policy_share: float | None
    """Share of the delivered tokens that are of an older version than the one that consumes
    them."""
    staleness_mean: float
    """Mean staleness of the delivered tokens, in versions."""
    staleness_max: int
    length_bias: float | None
    """Mean delivered length / mean drawn length - 1, over the whole run. It is a transient if all
    stragglers are carried."""
    first_batch_length_bias: float | None
    wall_s: float
    """Modelled seconds of the whole run."""
    batches: int
    seconds_a_batch: float | None
    seconds_p10: float | None
    seconds_p90: float | None
    """A tenth of the batches took less than the first, and a tenth more than the second."""
    reprefilled_tokens: int
    masked_tokens: int
    speedup: float | None
    """Delivered tokens/s divided by the baseline's."""
    schedule: str = ""
    """The schedule that automatic over-provisioning chose last; empty without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The content of comparison.json."""

    schema: int = 2
    baseline: str | None
    fastest: str | None
    best: str | None
    """The least stale policy of those within 1 % of the fastest, which has the highest
    efficiency."""
    policies: list[PolicyRow]


def compare(outcomes: Mapping[str, Outcome]) -> Comparison:
    """The figures of the policies by name, compared with the baseline if it is one of them."""
    steady = {name: outcome.summary.steady_state for name, outcome in outcomes.items()}
    base = steady[BASELINE].delivered_tokens_per_s if BASELINE in steady else None
    rows = [_row(name, outcome, base) for name, outcome in outcomes.items()]
    known = [row for row in rows if row.efficiency is not None]
    fastest = max(known, key=lambda row: row.efficiency or 0.0, default=None)
    return Comparison(
        baseline=BASELINE if BASELINE in outcomes else None,
        fastest=None if fastest is None else fastest.policy,
        best=None if fastest is None else _best(known, fastest),
        policies=rows,
    )


def describe(policy: Policy, schedule: str) -> str:
    """What a policy does, and which schedule it chose, if it chose one."""
    text = f"{policy.name}: {policy.what}"
    return f"{text} It chose {schedule}." if schedule else text


def verdict(comparison: Comparison) -> str:
    """Which policy is the best, by which rule, and compared with the synchronous baseline."""
    row = next((row for row in comparison.policies if row.policy == comparison.best), None)
    if row is None:
        return "Too few batches for a steady state: raise --batches."
    text = f"Best: {row.policy}"
    if row.policy != comparison.baseline and row.speedup is not None:
        text += f", {signed_percent(row.speedup - 1)} delivered tokens/s over {BASELINE}"
    return (
        f"{text} ({percent(row.efficiency)} of the bound, {percent(row.off_policy_share)} of its "
        f"tokens off-policy). It is the least stale policy within {_FLAT:.0%} of the fastest, "
        f"which is {comparison.fastest}."
    )


def _best(rows: list[PolicyRow], fastest: PolicyRow) -> str:
    least = (1 - _FLAT) * (fastest.efficiency or 0.0)
    near = [row for row in rows if (row.efficiency or 0.0) >= least]
    return min(near, key=lambda row: row.off_policy_share or 0.0).policy


def _row(name: str, outcome: Outcome, base: float | None) -> PolicyRow:
    summary, steady = outcome.summary, outcome.summary.steady_state
    rate = steady.delivered_tokens_per_s
    spread = spread_of_steps(summary)
    return PolicyRow(
        policy=name,
        efficiency=steady.efficiency,
        delivered_tokens_per_s=rate,
        generated_tokens_per_s=outcome.generated_tokens_per_s,
        off_policy_share=steady.off_policy_token_share,
        staleness_mean=summary.staleness_mean or 0.0,
        staleness_max=summary.staleness_max,
        length_bias=summary.bias.bias_estimate,
        first_batch_length_bias=summary.bias.first_batch_length_bias,
        wall_s=summary.seconds.wall,
        batches=summary.batches,
        seconds_a_batch=steady.mean_batch_seconds,
        seconds_p10=None if spread is None else spread[0],
        seconds_p90=None if spread is None else spread[1],
        reprefilled_tokens=summary.tokens.reprefilled,
        masked_tokens=summary.tokens.masked,
        speedup=rate / base if rate is not None and base else None,
        schedule=outcome.schedule,
    )
