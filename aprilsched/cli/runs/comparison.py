"""Compares the runs of several policies, for comparison.json and for one summary sentence."""

from __future__ import annotations

from aprilsched.cli.runs.named_policies import Policy
from aprilsched.cli.runs.tables import percent, signed_percent
from aprilsched.simulation.results import BASELINE, FLAT, SimulationResult
from aprilsched.simulation.side_by_side import Comparison


def describe(policy: Policy, result: SimulationResult) -> str:
    """Return what a policy did: its schedule, its unit of delivery, and the schedule that it chose,
    if any."""
    policies, what = result.config.policies, policy.what
    if not what:
        ratio = policies.over_provision
        what = f"{policies.refill.describe(f'{ratio:g}') if ratio else 'Automatic schedule'}."
    text = f"{policy.name}: {what[0].upper()}{what[1:]}"
    if policies.siblings is not None:
        text += f" It delivers single samples with {policies.siblings} siblings."
    return f"{text} It chose {result.schedule}." if result.schedule else text


def verdict(comparison: Comparison) -> str:
    """Return which policy is best, by which rule, and how it compares with synchronous."""
    row = next((row for row in comparison.policies if row.policy == comparison.best), None)
    if row is None:
        return "Too few batches for a steady state: raise --batches."
    text = f"Best: {row.policy}"
    if row.policy != comparison.baseline and row.speedup is not None:
        text += f", {signed_percent(row.speedup - 1)} delivered tokens/s over {BASELINE}"
    return (
        f"{text} ({percent(row.efficiency)} of the bound, {percent(row.off_policy_share)} of its "
        f"tokens off-policy). It is the least stale policy within {FLAT:.0%} of the fastest, "
        f"which is {comparison.fastest}."
    )
