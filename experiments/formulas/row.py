"""One comparison of a formula with the simulation."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Row"]


class Row(NamedTuple):
    """`where` says for which schedule; both values have one unit."""

    formula: str
    where: str
    predicted: float
    simulated: float

    @property
    def error(self) -> float:
        """Predicted over simulated, minus 1."""
        return self.predicted / self.simulated - 1 if self.simulated else 0.0
