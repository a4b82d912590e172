"""The policies by the names that they have in stores."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from aprilsched.core.policies.length_buckets import LengthBuckets
from aprilsched.core.policies.over_provision import FixedRatio, KvTarget, OverProvision
from aprilsched.core.policies.pool import Pool
from aprilsched.core.policies.refill import Refill
from aprilsched.core.policies.wave import Wave

__all__ = ["OVER_PROVISIONS", "REFILLS"]

REFILLS: Mapping[str, type[Refill]] = MappingProxyType(
    {kind.name: kind for kind in (Wave, Pool, LengthBuckets)}
)
OVER_PROVISIONS: Mapping[str, type[OverProvision]] = MappingProxyType(
    {kind.name: kind for kind in (FixedRatio, KvTarget)}
)
