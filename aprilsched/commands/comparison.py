"""Policies against each other: comparison.json, and the one sentence that sums it up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aprilsched.commands.tables import percent, signed_percent
from aprilsched.telemetry.figures import BiasFigures, RunSummary, SteadyState

__all__ = ["Comparison", "PolicyFigures", "compare", "verdict"]

BASELINE = "wait"

_FLAT = 0.02
"""Optima are flat: within this share of the fastest, the least stale policy is the better one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFigures:
    """One policy; whole-run figures are in its own summary.json."""

    speedup: float | None
    """Delivered tokens/s over the baseline's, in the steady state."""
    steady_state: SteadyState
    bias: BiasFigures
    staleness_mean: float
    staleness_max: int
    tokens_reprefilled: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What is in comparison.json."""

    schema: int = 1
    baseline: str | None
    fastest: str | None
    best: str | None
    """The least stale policy within 2 % of the fastest."""
    policies: dict[str, PolicyFigures]


def compare(summaries: Mapping[str, RunSummary]) -> Comparison:
    """The policies' figures, held against the baseline's if it is among them."""
    rates = {name: s.steady_state.delivered_tokens_per_s for name, s in summaries.items()}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    fastest = max(known, key=lambda name: known[name], default=None)
    base = known.get(BASELINE)
    return Comparison(
        baseline=BASELINE if BASELINE in summaries else None,
        fastest=fastest,
        best=None if fastest is None else _best(summaries, known, known[fastest]),
        policies={
            name: _figures(summary, None if base is None else _over(known.get(name), base))
            for name, summary in summaries.items()
        },
    )


def verdict(comparison: Comparison) -> str:
    """One sentence: what the best policy is, relative to waiting."""
    best = comparison.best
    if best is None:
        return "Too few batches for a steady state: raise --batches."
    figures = comparison.policies[best]
    steady = figures.steady_state
    facts = f"{percent(steady.efficiency)} of the bound"
    stale = f"{percent(steady.off_policy_token_share)} of its tokens off-policy"
    if best == comparison.baseline:
        return f"Best: {best}, {facts}, with {stale}."
    if figures.speedup is None:
        return f"Best: {best}, {facts}, with {stale} (not compared with {BASELINE})."
    gain = signed_percent(figures.speedup - 1)
    return f"Best: {best}, {gain} delivered tokens/s over {BASELINE} ({facts}), with {stale}."


def _best(summaries: Mapping[str, RunSummary], rates: Mapping[str, float], fastest: float) -> str:
    near = [name for name, rate in rates.items() if rate >= (1 - _FLAT) * fastest]
    return min(near, key=lambda name: summaries[name].steady_state.off_policy_token_share or 0.0)


def _figures(summary: RunSummary, speedup: float | None) -> PolicyFigures:
    return PolicyFigures(
        speedup=speedup,
        steady_state=summary.steady_state,
        bias=summary.bias,
        staleness_mean=summary.staleness.mean,
        staleness_max=summary.staleness.max,
        tokens_reprefilled=summary.tokens.reprefilled,
    )


def _over(rate: float | None, base: float) -> float | None:
    return rate / base if rate is not None and base else None
