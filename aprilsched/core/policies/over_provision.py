"""How many groups to keep open for a batch: the over-provision ratio."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

from aprilsched.checks import suggesting
from aprilsched.core.policies.bounds import Bound

__all__ = ["RATIO", "FixedRatio", "OverProvision"]

RATIO = Bound(least=1, most=64, words="a ratio from 1 (wait for all) to 64")


class OverProvision(ABC):
    """A rule for the number of open groups. A rule is a frozen dataclass of its settings."""

    __slots__ = ()

    name: ClassVar[str]

    @abstractmethod
    def target_groups(self, batch_groups: int) -> int:
        """Groups to have open (generating, or ready and undelivered) for the next batch, which
        takes `batch_groups` of them."""

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

    def target_groups(self, batch_groups: int) -> int:
        # Guards against 1.1 * 10 = 11.000000000000002 rounding up to 12.
        return math.ceil(self.ratio * batch_groups - 1e-9)

    @property
    def told(self) -> str:
        return f"{self.ratio:g}"
