"""The settings of a scheduler: :class:`SchedulerConfig` and the values that it is made of."""

from __future__ import annotations

from aprilsched.core.config import KVAfterRefit, Pace, RefillRule, SchedulerConfig, StopUnit
from aprilsched.core.policies.length_buckets import LengthBuckets
from aprilsched.core.policies.pool import Pool
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.stop import Groups, Samples, Stop, Tokens
from aprilsched.core.policies.straggler import Prices, StragglerRule
from aprilsched.core.policies.wave import Wave

__all__ = [
    "Groups",
    "KVAfterRefit",
    "LengthBuckets",
    "Pace",
    "Pool",
    "Prices",
    "Refill",
    "RefillRule",
    "Samples",
    "SchedulerConfig",
    "Stop",
    "StopUnit",
    "StragglerRule",
    "Tokens",
    "Wave",
]
