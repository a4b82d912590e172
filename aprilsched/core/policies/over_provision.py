"""How many groups to keep open for a batch: the over-provision ratio."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["FixedRatio", "KvTarget", "OverProvision", "PoolLoad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLoad:
    """What an over-provisioning rule sees at the begin of a batch.

    Attributes:
        batch_groups: groups in a batch.
        current: groups that were kept open for the last one.
        kv_share: the most that was in use of the fleet's KV pool since then, 0 to 1; None where
            the engines do not say how large it is.
    """

    batch_groups: int
    current: int
    kv_share: float | None = None


class OverProvision(ABC):
    """A rule for how many groups are open. Rules are frozen dataclasses of their settings."""

    __slots__ = ()

    name: ClassVar[str]

    @abstractmethod
    def target_groups(self, load: PoolLoad) -> int:
        """Groups to have open (generating, or ready and undelivered) for the next batch."""

    @property
    @abstractmethod
    def told(self) -> str:
        """How many batches of groups, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedRatio(OverProvision):
    """A constant ratio rho = C / N (APRIL's over-sampling; 2 in its paper)."""

    name: ClassVar[str] = "fixed"

    ratio: float

    def target_groups(self, load: PoolLoad) -> int:
        # Guards against 1.1 * 10 = 11.000000000000002 rounding up to 12.
        return math.ceil(self.ratio * load.batch_groups - 1e-9)

    @property
    def told(self) -> str:
        return f"{self.ratio:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTarget(OverProvision):
    """Additive increase, multiplicative decrease towards a share of the KV pool (a baseline).

    As congestion control does (Chiu and Jain, 1989), and prime-rl for its cap in flight: it fills
    the memory, whatever that does to staleness and prefill.
    """

    name: ClassVar[str] = "kv"

    target: float = 0.8
    """Share of the KV pool that should be in use at a batch's peak."""
    step: float = 0.125
    """Increase, in batches, while the peak is below the target."""
    back_off: float = 0.75
    """Factor once it is above."""

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
