"""The scheduling policies that ``simulate`` knows, as a literal table.

A policy is a handful of scheduler settings. Each entry says where it comes from and what it is
known to cost, so that a comparison can be read without the papers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from aprilsched.commands.settings import SchedulerFlags
from aprilsched.errors import ConfigError

__all__ = ["POLICIES", "Policy", "chosen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Scheduler settings under a name."""

    what: str
    """What it does, in a few words."""
    source: str
    """Where it comes from."""
    cost: str
    """What it is known to cost."""
    settings: Mapping[str, Any]
    """Fields of SchedulerConfig."""

    def apply(self, flags: SchedulerFlags) -> SchedulerFlags:
        """`flags` with this policy's settings."""
        return replace(flags, **self.settings)


POLICIES: dict[str, Policy] = {
    "wait": Policy(
        what="wait for every last response",
        source="synchronous on-policy RL: PPO and GRPO as first published",
        cost="the engine decodes a few stragglers, and then nothing, at the end of each batch",
        settings={"over_provision": 1.0, "refill": "wave"},
    ),
    "april": Policy(
        what="launch twice the batch, hand over the first half, carry the rest",
        source="APRIL (arXiv 2509.18521), with the ratio 2 of its experiments",
        cost="each carried sample is prefilled again at every refit and is partly off-policy",
        settings={"over_provision": 2.0, "refill": "wave"},
    ),
    "pool": Policy(
        what="keep one batch's worth generating, refilled four groups at a time",
        source="the constant pool of fully asynchronous trainers, with coalesced refills",
        cost="nearly everything is in flight at a refit: most prefill again, most staleness",
        settings={"over_provision": 1.0, "refill": "pool", "refill_groups": 4},
    ),
}


def chosen(names: str) -> Sequence[str]:
    """The policies in a list with commas.

    Raises:
        ConfigError: if there is none, an unknown one, or one twice.
    """
    policies = [name.strip() for name in names.split(",") if name.strip()]
    if not policies:
        raise ConfigError(f"policy names nothing; choose among {', '.join(POLICIES)}.")
    for name in policies:
        if name not in POLICIES:
            near = get_close_matches(name, POLICIES, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{name!r} is no policy; the nearest known one is {near}.")
        if policies.count(name) > 1:
            raise ConfigError(f"The policy {name} is named twice; name each once.")
    return policies
