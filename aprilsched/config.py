"""The settings of a scheduler: :class:`SchedulerConfig` and the values that it is made of."""

from __future__ import annotations

from aprilsched.core.config import KVAfterRefit, Pace, RefillRule, SchedulerConfig, StopUnit
from aprilsched.core.policies.straggler import Prices, StragglerRule

__all__ = [
    "KVAfterRefit",
    "Pace",
    "Prices",
    "RefillRule",
    "SchedulerConfig",
    "StopUnit",
    "StragglerRule",
]
