"""Computes the effect of a schedule on the mean length, by a conservation identity.

Of n responses with mean length mu, let m not be among the delivered ones (in flight, or dropped),
with mean final length l. The sum of all lengths is n * mu, so the delivered ones have exactly

    mean / mu - 1 = -m * (l / mu - 1) / (n - m)

If the m responses are in flight and the policy does not change, m stays bounded while n - m grows,
so the bias is a transient. If they are dropped, m grows with n, and the bias stays. A bias is a
share of mu: 0 is none, and -0.1 is 10 % short.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from aprilsched.core.lengths.kaplan_meier import KaplanMeier

__all__ = ["batches_until", "bias_without", "expected_lengths"]


def bias_without(absent: int, absent_mean: float, present: int, mean: float) -> float:
    """The bias of the `present` responses if `absent` others have the mean length `absent_mean`.

    `mean` is the mean of the law; lengths are in tokens. The bias is 0 if nothing is present or
    absent.
    """
    if not absent or not present or not mean:
        return 0.0
    return -absent * (absent_mean / mean - 1) / present


def batches_until(bias: float, *, in_flight: int, excess: float, per_batch: float) -> int:
    """Number K of batches after which the transient is at most `bias` (a share, above 0).

    K = |in_flight * excess| / (bias * per_batch), rounded up, where `excess` is l / mu - 1 of the
    responses in flight and `per_batch` the number of responses in a batch.

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
    """Expected final lengths, float64 [n]: the length of a finished response, and tokens plus
    E[rest | tokens] of an unfinished one."""
    return np.where(finished, tokens, tokens + law.residual_mean(tokens))
