"""Several simulated policies in one table and one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any

import numpy as np

from aprilsched.observe.figures.run_figures import RunSummary
from aprilsched.simulation.results import BASELINE, FLAT, SimulationResult

BY_SEED = ("delivered_tokens_per_s", "staleness_mean", "step_efficiency", "step_s")
"""The figures whose value of each seed is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRow:
    """The figures of one policy: means over seeds. A figure that cannot be known is None.

    Rates, efficiency, shares and staleness cover the steady state, after the burn-in. All other
    figures cover the whole run.
    """

    policy: str
    siblings: int | None
    """Number of siblings of each sample; None if whole groups are delivered."""
    efficiency: float | None
    """T_bound / T: the least possible time for the delivered tokens, divided by the actual time,
    without the time in which the engines idle for the trainer."""
    step_efficiency: float | None
    """The same with that time: T_bound over the seconds of whole steps."""
    delivered_tokens_per_s: float | None
    """Sampled tokens that the trainer gets, over the seconds of whole steps."""
    generated_tokens_per_s: float | None
    """All tokens that the engines generated, including those still in flight at the end."""
    off_policy_share: float | None
    """Share of the delivered tokens that come from an older version than the one that consumes
    them."""
    staleness_mean: float | None
    """Mean staleness of the delivered tokens, in versions."""
    staleness_max: int
    """Largest staleness of a delivered token of any seed, in versions."""
    length_bias: float | None
    """Mean delivered length / mean drawn length - 1, over the whole run. It is a transient if all
    stragglers are carried."""
    first_batch_length_bias: float | None
    wall_s: float
    """Modelled seconds of the whole run."""
    batches: int
    step_s: float | None
    """Mean seconds of a whole step, from delivery to delivery, the trainer's time included under
    every pace; after the burn-in."""
    step_p10: float | None
    step_p90: float | None
    """A tenth of these steps took less than the first, and a tenth more than the second."""
    reprefilled_tokens: int
    masked_tokens: int
    speedup: float | None
    """Delivered tokens/s divided by the baseline's."""
    schedule: str = ""
    """The schedule that automatic over-provisioning chose last under the last seed; empty without
    it."""
    seeds: int = 1
    delivered_tokens_per_s_range: tuple[float, float] | None = None
    """The smallest and the largest of the seeds; None for one seed."""
    staleness_mean_range: tuple[float, float] | None = None
    """The smallest and the largest of the seeds; None for one seed."""
    by_seed: Mapping[str, Sequence[float | None]] = field(default_factory=dict[str, Any])
    """The values of each seed, in the order of seeds, of the fields in BY_SEED."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Policies side by side: the content of comparison.json."""

    schema: int = 5
    baseline: str | None
    fastest: str | None
    """The policy that delivers the most tokens a second. These are the seconds of whole steps, so a
    trainer that the engines wait for counts, which it does not in `efficiency`."""
    best: str | None
    """The policy with the lowest mean staleness of those within 1 % of the fastest."""
    interval: str = "smallest and largest of the seeds"
    """What the fields whose names end in _range contain."""
    policies: list[PolicyRow]


def compare(
    results: Mapping[str, SimulationResult | RunSummary | Sequence[SimulationResult]],
) -> Comparison:
    """Return the figures of results by name, compared with the one named "sync" if there is one.

    A summary among the results comes from a real run, and a sequence has a result for each seed.
    """
    rows = [row_of(name, result) for name, result in results.items()]
    base = next((row.delivered_tokens_per_s for row in rows if row.policy == BASELINE), None)
    if base:
        rows = [_compared(row, base) for row in rows]
    known = [row for row in rows if row.delivered_tokens_per_s is not None]
    fastest = max(known, key=lambda row: row.delivered_tokens_per_s or 0.0, default=None)
    return Comparison(
        baseline=BASELINE if BASELINE in results else None,
        fastest=None if fastest is None else fastest.policy,
        best=None if fastest is None else _best(known, fastest),
        policies=rows,
    )


def spread_of_steps(summary: RunSummary) -> tuple[float, float] | None:
    """Return the 10th and 90th percentile of step times after the burn-in, in seconds.

    Only whole steps count; None without such steps.
    """
    steps = summary.steady_steps_s
    if not steps:
        return None
    low, high = np.percentile(steps, (10, 90))
    return float(low), float(high)


def _best(rows: list[PolicyRow], fastest: PolicyRow) -> str:
    least = (1 - FLAT) * (fastest.delivered_tokens_per_s or 0.0)
    near = [row for row in rows if (row.delivered_tokens_per_s or 0.0) >= least]
    return min(near, key=lambda row: row.staleness_mean or 0.0).policy


def _summary(result: SimulationResult | RunSummary) -> RunSummary:
    return result.summary if isinstance(result, SimulationResult) else result


def _compared(row: PolicyRow, base: float) -> PolicyRow:
    rate = row.delivered_tokens_per_s
    return row if rate is None else replace(row, speedup=rate / base)


def row_of(
    name: str, results: SimulationResult | RunSummary | Sequence[SimulationResult]
) -> PolicyRow:
    """Return the figures of one policy, without its speedup."""
    several = results if isinstance(results, Sequence) else [results]
    rows = [_row(name, result) for result in several]
    if len(rows) == 1:
        return rows[0]
    means = {
        field.name: _mean([getattr(row, field.name) for row in rows]) for field in fields(rows[0])
    }
    means |= {
        f"{name}_range": None if None in values else (min(values), max(values))
        for name in ("delivered_tokens_per_s", "staleness_mean")
        for values in [[getattr(row, name) for row in rows]]
    }
    means |= {"staleness_max": max(row.staleness_max for row in rows), "seeds": len(rows)}
    means["by_seed"] = {name: [getattr(row, name) for row in rows] for name in BY_SEED}
    return PolicyRow(**means)


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, the last one of other values, and None if one is None."""
    if None in values:
        return None
    if isinstance(values[-1], float):
        return fmean(values)
    return round(fmean(values)) if isinstance(values[-1], int) else values[-1]


def _row(name: str, result: SimulationResult | RunSummary) -> PolicyRow:
    summary = _summary(result)
    simulated = result if isinstance(result, SimulationResult) else None
    steady = summary.steady_state
    steps, spread = summary.steady_steps_s, spread_of_steps(summary)
    return PolicyRow(
        policy=name,
        siblings=None if simulated is None else simulated.config.policies.siblings,
        efficiency=steady.efficiency,
        step_efficiency=summary.step_efficiency,
        delivered_tokens_per_s=steady.delivered_tokens_per_s,
        generated_tokens_per_s=None if simulated is None else simulated.generated_tokens_per_s,
        off_policy_share=steady.off_policy_token_share,
        staleness_mean=steady.staleness_mean,
        staleness_max=steady.staleness_max,
        length_bias=summary.bias.bias_estimate,
        first_batch_length_bias=summary.bias.first_batch_length_bias,
        wall_s=summary.seconds.wall,
        batches=summary.batches,
        step_s=sum(steps) / len(steps) if steps else None,
        step_p10=None if spread is None else spread[0],
        step_p90=None if spread is None else spread[1],
        reprefilled_tokens=summary.tokens.reprefilled,
        masked_tokens=summary.tokens.masked,
        speedup=None,
        schedule="" if simulated is None else simulated.schedule,
    )
