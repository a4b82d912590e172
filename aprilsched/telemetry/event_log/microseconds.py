"""Times as a log writes them: to the microsecond."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["to_microseconds"]

_DIGITS = 6
_NEAR_TIE = 1e-3
_EXACT_BELOW = 1e6
"""Seconds: up to there the error of a product with a million is far smaller than `_NEAR_TIE`."""


def to_microseconds(seconds: NDArray[np.float64]) -> list[float]:
    """``round(s, 6)`` of each, to the last bit, in a tenth of its time: rounding took as long as
    all else that a line needs. Only what may be a tie is left to ``round``."""
    micro = seconds * 10**_DIGITS
    whole = np.rint(micro)
    rounded: list[float] = (whole / 10**_DIGITS).tolist()
    doubtful = np.abs(micro - whole) > 0.5 - _NEAR_TIE
    doubtful |= np.abs(micro) > _EXACT_BELOW * 10**_DIGITS
    for index in np.flatnonzero(doubtful).tolist():
        rounded[index] = round(float(seconds[index]), _DIGITS)
    return rounded
