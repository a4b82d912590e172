"""The named policies; flags, config.toml and stores use their names.

A new refill rule gets a name by one line of :data:`REFILLS` and one member of :data:`RefillRule`. A
rule without a name is used as a value, ``SchedulerConfig(refill=MyRule())``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

from aprilsched.kernel.core.policies.length_buckets import LengthBuckets
from aprilsched.kernel.core.policies.pool import Pool
from aprilsched.kernel.core.policies.refill import Refill
from aprilsched.kernel.core.policies.stop import Groups, Samples, Stop, Tokens
from aprilsched.kernel.core.policies.tail_batching import TailBatching
from aprilsched.kernel.core.policies.wave import Wave

RefillRule: TypeAlias = Literal["wave", "pool", "buckets", "tail"]

StopUnit: TypeAlias = Literal["groups", "samples", "tokens"]

REFILLS: Mapping[str, type[Refill]] = MappingProxyType(
    {kind.name: kind for kind in (Wave, Pool, LengthBuckets, TailBatching)}
)
STOPS: Mapping[str, type[Stop]] = MappingProxyType(
    {kind.name: kind for kind in (Groups, Samples, Tokens)}
)
