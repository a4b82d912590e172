"""Settings and prompts of runs that are over in seconds of virtual time."""

from __future__ import annotations

from typing import Any

from aprilsched import LongTailWorkload, SchedulerConfig

__all__ = ["config", "workload"]


def config(**changes: Any) -> SchedulerConfig:
    """Batches of four groups of four, of which twice as many are launched."""
    values: dict[str, Any] = {"batch_groups": 4, "group_size": 4, "over_provision": 2.0}
    return SchedulerConfig(**{**values, **changes})


def workload(count: int | None = None, **changes: Any) -> LongTailWorkload:
    """Groups of four responses of some 60 tokens, and of at most 600."""
    values: dict[str, Any] = {"median": 60, "sigma": 0.9, "cap": 600, "group_size": 4, "seed": 3}
    return LongTailWorkload(**{**values, **changes}, count=count)
