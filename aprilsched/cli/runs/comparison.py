"""Compares the runs of several policies, for comparison.json and for one summary sentence."""

from __future__ import annotations

from aprilsched.cli.runs.named_policies import Policy
from aprilsched.cli.runs.tables import number, signed_percent
from aprilsched.simulation.results import BASELINE, FLAT, SimulationResult
from aprilsched.simulation.side_by_side import Comparison


def describe(policy: Policy, result: SimulationResult, *, trains: bool) -> str:
    """Return what a policy did: its schedule, its unit of delivery, its pace if `trains`, and the
    schedule that it chose, if any."""
    policies, what = result.config.policies, policy.what
    if not what:
        ratio = policies.over_provision
        what = f"{policies.refill.describe(f'{ratio:g}') if ratio else 'Automatic schedule'}."
    text = f"{what[0].upper()}{what[1:]}"
    if policies.siblings is not None:
        text += f" It delivers single samples with {policies.siblings} siblings."
    if trains and (pace := result.config.pace) != "auto":
        does = "generate" if pace == "asynchronous" else "wait"
        text += f" Engines {does} while the trainer trains."
    return f"{text} Its last choice was {result.schedule}." if result.schedule else text


def verdict(comparison: Comparison) -> str:
    """Return the fastest policy, the least stale one near it, and its speed over synchronous."""
    row = next((row for row in comparison.policies if row.policy == comparison.best), None)
    if row is None:
        return "Too few batches for a steady state: raise --batches."
    staleness = f"mean staleness ({number(row.staleness_mean, 2)})"
    text = f"Fastest: {comparison.fastest}"
    if row.policy == comparison.fastest:
        text += f". No policy within {FLAT:.0%} of it has a lower {staleness}."
    else:
        text += f". Within {FLAT:.0%} of it, {row.policy} has the lowest {staleness}."
    if row.policy == comparison.baseline or row.speedup is None:
        return text
    gain = signed_percent(row.speedup - 1)
    return f"{text} {row.policy} delivers {gain} tokens/s over {BASELINE} in the steady state."
