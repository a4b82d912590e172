"""Compares the runs of several policies, for comparison.json and for one summary sentence."""

from __future__ import annotations

from aprilsched.cli.runs.named_policies import Policy
from aprilsched.cli.runs.tables import percent, signed_percent
from aprilsched.simulation.results import BASELINE, FLAT
from aprilsched.simulation.side_by_side import Comparison


def describe(policy: Policy, schedule: str) -> str:
    """Return what a policy does, and the schedule that it chose, if any."""
    text = f"{policy.name}: {policy.what}"
    return f"{text} It chose {schedule}." if schedule else text


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
