"""The settings of a scheduler: :class:`SchedulerConfig` and the values that it is made of."""

from __future__ import annotations

from aprilsched.core.config import (
    Dispatch,
    Health,
    KVAfterRefit,
    Pace,
    PaceRule,
    Policies,
    Retries,
    SchedulerConfig,
    Timeouts,
)
from aprilsched.core.policies.kinds import RefillRule, StopUnit
from aprilsched.core.policies.length_buckets import LengthBuckets
from aprilsched.core.policies.objective import Objective
from aprilsched.core.policies.over_provision import FixedRatio, OverProvision
from aprilsched.core.policies.pool import Pool
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.staleness import Staleness
from aprilsched.core.policies.stop import Groups, Samples, Stop, Tokens
from aprilsched.core.policies.straggler import Prices, StragglerRule
from aprilsched.core.policies.tail_batching import TailBatching
from aprilsched.core.policies.wave import Wave
from aprilsched.types import SamplingParams

__all__ = [
    "Dispatch",
    "FixedRatio",
    "Groups",
    "Health",
    "KVAfterRefit",
    "LengthBuckets",
    "Objective",
    "OverProvision",
    "Pace",
    "PaceRule",
    "Policies",
    "Pool",
    "Prices",
    "Refill",
    "RefillRule",
    "Retries",
    "Samples",
    "SamplingParams",
    "SchedulerConfig",
    "Staleness",
    "Stop",
    "StopUnit",
    "StragglerRule",
    "TailBatching",
    "Timeouts",
    "Tokens",
    "Wave",
]
