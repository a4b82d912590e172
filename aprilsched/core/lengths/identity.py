"""What a schedule does to the mean length, by conservation.

Of n responses with mean length mu, let m be somewhere else (in flight, or dropped), with mean
final length l. The sum of all lengths is n * mu, so the others have

    mean / mu - 1 = -m * (l / mu - 1) / (n - m)

exactly. In flight and with a policy that does not change, m stays bounded while n - m grows: a
transient. Dropped, m grows with n: the bias stays. Shares of mu, 0 is no bias, -0.1 is 10 % short.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.kaplan_meier import KaplanMeier

__all__ = ["batches_until", "bias_without", "expected_lengths"]


def bias_without(absent: int, absent_mean: float, present: int, mean: float) -> float:
    """The bias of the `present` responses, when `absent` ones of `absent_mean` are elsewhere.

    `mean` is that of the law; lengths in tokens. 0 if nothing is present or absent.
    """
    if not absent or not present or not mean:
        return 0.0
    return -absent * (absent_mean / mean - 1) / present


def batches_until(bias: float, *, in_flight: int, excess: float, per_batch: float) -> int:
    """Batches K after which the transient is at most `bias` (a share, above 0).

    K = |in_flight * excess| / (bias * per_batch), rounded up, with `excess` = l / mu - 1 of
    those in flight and `per_batch` responses in a batch.

    Raises:
        ValueError: if `bias` or `per_batch` is not above 0.
    """
    if bias <= 0 or per_batch <= 0:
        raise ValueError(
            f"bias is {bias} and per_batch {per_batch}; give numbers above 0 (no finite run has "
            "no transient at all)."
        )
    return math.ceil(abs(in_flight * excess) / (bias * per_batch))


def expected_lengths(
    law: KaplanMeier, tokens: NDArray[np.int64], finished: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Final lengths float64 [n]: known where `finished`, else tokens plus E[rest | tokens]."""
    return np.where(finished, tokens, tokens + law.residual_mean(tokens))
