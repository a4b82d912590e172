"""How many groups to keep open for a batch: the over-provision ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

__all__ = ["FixedRatio", "OverProvision"]


class OverProvision(Protocol):
    def target_groups(self, batch_groups: int) -> int:
        """Groups to have open (generating, or ready and undelivered) for a batch."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedRatio:
    """A constant ratio rho = C / N (APRIL's over-sampling; 2 in its paper)."""

    ratio: float

    def target_groups(self, batch_groups: int) -> int:
        # Guards against 1.1 * 10 = 11.000000000000002 rounding up to 12.
        return math.ceil(self.ratio * batch_groups - 1e-9)
