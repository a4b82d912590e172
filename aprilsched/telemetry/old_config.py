"""Reads the settings of an older config.toml under the names of today.

Until version 0.1 the table ``[scheduler]`` was flat, and had the settings of every policy whether
the policy was in use or not. This table of names is all that still knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["renamed"]

_PATHS: Mapping[str, str] = {
    "resume_order": "dispatch.order",
    "placement": "dispatch.placement",
    "max_in_flight": "dispatch.max_in_flight",
    "dispatch_rate": "dispatch.rate",
    "max_attempts": "retries.attempts",
    "max_breaks": "retries.interruptions",
    "max_failed_groups": "retries.failed_groups",
    "stall_timeout_s": "health.stall_s",
    "slow_share": "health.slow_share",
    "fleet_wait_s": "health.fleet_wait_s",
    "control_timeout_s": "timeouts.control_s",
    "refit_timeout_s": "timeouts.refit_s",
}
"""Where the settings are today that were at the top."""

_POLICIES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("refill", "pool"): {"refill_groups": "together", "refill_until": "until"},
    ("refill", "buckets"): {
        "store_batches": "store",
        "probes": "probes",
        "oldest_batches": "oldest",
    },
    ("over_provision", "kv"): {"kv_target": "target"},
    ("stop", "samples"): {"batch_samples": "amount"},
    ("stop", "tokens"): {"batch_tokens": "amount"},
    ("start_up", "wait"): {"start_up_batches": "batches"},
    ("start_up", "ramp"): {"start_up_batches": "batches"},
}
"""The settings of a policy, which count only where the policy is in use."""

_OLD = {"staleness_rule", "rebalance", *_PATHS, *(k for part in _POLICIES.values() for k in part)}


def renamed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.toml with the names of today; one of today is as it was."""
    if not isinstance(content.get("scheduler"), Mapping):
        return dict(content)
    old: Mapping[str, Any] = content["scheduler"]
    scheduler: dict[str, Any] = {key: old[key] for key in old if key not in _OLD}
    if scheduler.get("refill") == "rounds":
        scheduler["refill"] = "buckets"
    for (name, rule), parts in _POLICIES.items():
        own = {new: old[key] for key, new in parts.items() if key in old}
        if scheduler.get(name) == rule and own:
            scheduler[name] = {"rule": rule, **own}
    if "staleness_rule" in old and isinstance(scheduler.get("max_staleness"), int):
        bound = scheduler["max_staleness"]
        scheduler["max_staleness"] = {"bound": bound, "rule": old["staleness_rule"]}
    for key, path in _PATHS.items():
        if key in old:
            part, name = path.split(".")
            scheduler[part] = {**scheduler.get(part, {}), name: old[key]}
    return {**content, "scheduler": scheduler}
