"""Compares the runs of several policies, for comparison.json and for one summary sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aprilsched.runs.tables import percent, signed_percent, spread_of_steps
from aprilsched.telemetry.figures import RunSummary

__all__ = ["Comparison", "PolicyRow", "compare", "verdict"]

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


def compare(
    summaries: Mapping[str, RunSummary],
    generated: Mapping[str, float | None],
    schedules: Mapping[str, str],
) -> Comparison:
    """The figures of the policies, compared with the baseline if it is one of them.

    Args:
        summaries: summary of each policy's run.
        generated: tokens/s that each policy's engines generated in its steady state.
        schedules: schedule that each policy chose automatically, if it did.
    """
    rates = {name: s.steady_state.delivered_tokens_per_s for name, s in summaries.items()}
    base = rates.get(BASELINE)
    rows = [
        _row(name, summary, generated[name], base, schedules.get(name, ""))
        for name, summary in summaries.items()
    ]
    known = [row for row in rows if row.efficiency is not None]
    fastest = max(known, key=lambda row: row.efficiency or 0.0, default=None)
    return Comparison(
        baseline=BASELINE if BASELINE in summaries else None,
        fastest=None if fastest is None else fastest.policy,
        best=None if fastest is None else _best(known, fastest),
        policies=rows,
    )


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


def _row(
    name: str, summary: RunSummary, generated: float | None, base: float | None, schedule: str
) -> PolicyRow:
    steady = summary.steady_state
    rate = steady.delivered_tokens_per_s
    spread = spread_of_steps(summary)
    return PolicyRow(
        policy=name,
        efficiency=steady.efficiency,
        delivered_tokens_per_s=rate,
        generated_tokens_per_s=generated,
        off_policy_share=steady.off_policy_token_share,
        staleness_mean=summary.staleness.mean,
        staleness_max=summary.staleness.max,
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
        schedule=schedule,
    )
