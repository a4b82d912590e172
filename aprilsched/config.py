"""The settings of a scheduler: :class:`SchedulerConfig` and the values that it is made of."""

from __future__ import annotations

from aprilsched.kernel.core.config import (
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
from aprilsched.kernel.core.policies.kinds import RefillRule, StopUnit
from aprilsched.kernel.core.policies.length_buckets import LengthBuckets
from aprilsched.kernel.core.policies.objective import Objective
from aprilsched.kernel.core.policies.pool import Pool
from aprilsched.kernel.core.policies.refill import OpenGroups, PoolView, Refill
from aprilsched.kernel.core.policies.repack import Prices
from aprilsched.kernel.core.policies.staleness import Staleness
from aprilsched.kernel.core.policies.stop import (
    CompleteGroup,
    CompleteGroups,
    Groups,
    Samples,
    Stop,
    Tokens,
)
from aprilsched.kernel.core.policies.straggler import Behaviour, StragglerRule
from aprilsched.kernel.core.policies.tail_batching import TailBatching
from aprilsched.kernel.core.policies.wave import Wave
from aprilsched.types import SamplingParams

__all__ = [
    "Behaviour",
    "CompleteGroup",
    "CompleteGroups",
    "Dispatch",
    "Groups",
    "Health",
    "KVAfterRefit",
    "LengthBuckets",
    "Objective",
    "OpenGroups",
    "Pace",
    "PaceRule",
    "Policies",
    "Pool",
    "PoolView",
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
