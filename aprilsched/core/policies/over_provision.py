"""How many groups to keep open for a batch: the over-provision ratio."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

from aprilsched.checks import suggesting
from aprilsched.core.policies.bounds import ABOVE_0, SHARE, SHARE_BELOW_1, Bound

__all__ = ["RATIO", "FixedRatio", "KvTarget", "OverProvision", "PoolLoad"]

RATIO = Bound(least=1, most=64, words="a ratio from 1 (wait for all) to 64")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLoad:
    """What an over-provisioning rule sees when a batch begins.

    Attributes:
        batch_groups: number of groups in a batch.
        current: number of groups that were kept open for the batch before.
        kv_share: largest share of the fleet's KV pool that was in use since then, from 0 to 1; None
            if the engines do not report the size of the pool.
    """

    batch_groups: int
    current: int
    kv_share: float | None = None


class OverProvision(ABC):
    """A rule for the number of open groups. A rule is a frozen dataclass of its settings."""

    __slots__ = ()

    name: ClassVar[str]

    @abstractmethod
    def target_groups(self, load: PoolLoad) -> int:
        """Groups to have open (generating, or ready and undelivered) for the next batch."""

    @property
    @abstractmethod
    def told(self) -> str:
        """How many batches of groups are kept open, in words."""


@suggesting()
@dataclass(frozen=True, slots=True)
class FixedRatio(OverProvision):
    """A constant ratio rho = C / N (APRIL's over-sampling; 2 in its paper)."""

    name: ClassVar[str] = "fixed"

    ratio: Annotated[float, RATIO]
    """Ratio of groups kept open to groups in a batch."""

    def target_groups(self, load: PoolLoad) -> int:
        # Guards against 1.1 * 10 = 11.000000000000002 rounding up to 12.
        return math.ceil(self.ratio * load.batch_groups - 1e-9)

    @property
    def told(self) -> str:
        return f"{self.ratio:g}"


@suggesting()
@dataclass(frozen=True, slots=True)
class KvTarget(OverProvision):
    """Additive increase and multiplicative decrease towards a share of the KV pool.

    Congestion control works like this (Chiu and Jain, 1989), and so does prime-rl's limit of
    requests in flight. It is a baseline: it fills the memory, whatever this does to staleness and
    prefill.
    """

    name: ClassVar[str] = "kv"

    target: Annotated[float, SHARE] = 0.8
    """Share of the KV pool that should be in use at the peak of a batch."""
    step: Annotated[float, ABOVE_0] = 0.125
    """Number of batches by which the open groups grow while the peak is below `target`."""
    back_off: Annotated[float, SHARE_BELOW_1] = 0.75
    """Factor by which the open groups shrink once the peak is above `target`."""

    def target_groups(self, load: PoolLoad) -> int:
        current = max(load.current, load.batch_groups)
        if load.kv_share is None:
            return current
        if load.kv_share > self.target:
            return max(load.batch_groups, math.floor(self.back_off * current))
        return current + math.ceil(self.step * load.batch_groups)

    @property
    def told(self) -> str:
        return "KV-bounded"
