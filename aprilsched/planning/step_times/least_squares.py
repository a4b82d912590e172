"""Least squares with non-negative coefficients, robust against windows that were disturbed.

Errors are relative, because a disturbance changes a window's time in proportion: rows are
divided by what was measured, and the target is 1.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from aprilsched.planning.step_times.server_log import Floats

_TUNING = 1.345
_EXCHANGES = 20
_SLOPE = 1e-12
_MAD_TO_SIGMA = 1.4826
_LEAST_SCALE = 1e-4


def nonnegative(gram: Floats, moment: Floats) -> Floats:
    """Return the x >= 0 that minimizes ``x @ gram @ x / 2 - moment @ x``, float64 [n].

    With ``gram = A.T @ A`` and ``moment = A.T @ y`` it minimizes ``|A @ x - y|``. Coefficients
    switch between free and zero, all wrong ones at once, until no free one is negative and no zero
    one would help (block principal pivoting; Kim and Park, 2011). If that does not end, every set
    of free coefficients is tried.
    """
    unit = 1 / np.sqrt(np.maximum(np.diag(gram), 1e-300))  # Columns differ by ten decades.
    scaled, target = gram * np.outer(unit, unit), moment * unit
    free = np.ones(len(moment), dtype=np.bool_)
    for _ in range(_EXCHANGES):
        x = _solved(scaled, target, free)
        slope = target - scaled @ x
        wrong = np.where(free, x < 0, slope > _SLOPE * np.abs(target).max(initial=0.0))
        if not wrong.any():
            return x * unit
        free ^= wrong
    return _best_of_all(scaled, target) * unit


def _solved(gram: Floats, moment: Floats, free: NDArray[np.bool_]) -> Floats:
    """Return the least squares over the free coefficients; the others are 0."""
    x = np.zeros(len(moment))
    if free.any():
        x[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free])[0]
    return x


def _best_of_all(gram: Floats, moment: Floats) -> Floats:
    """Return the best allowed solution over all sets of free coefficients."""
    sets = product([False, True], repeat=len(moment))
    solutions = [_solved(gram, moment, np.array(free)) for free in sets]
    allowed = [x for x in solutions if (x >= 0).all()]
    return min(allowed, key=lambda x: float(x @ gram @ x / 2 - moment @ x))


def robust(
    rows: Floats, measured: Floats, *, weights: Floats | None = None, rounds: int = 25
) -> Floats:
    """Return the x >= 0 for which ``rows @ x`` is near `measured`, float64 [columns].

    It minimizes Huber's loss of the relative error by re-weighting: a window whose error is above
    1.345 scales (the scale is the median absolute error times 1.4826) has the weight
    1.345 scales / its error. So windows in which the engine was paused have little influence.
    `weights` are what each window counts for besides; without them all count alike.
    """
    scaled = rows / measured[:, None]
    own = np.ones(len(measured)) if weights is None else weights
    weight = own
    x = np.zeros(rows.shape[1])
    for _ in range(rounds):
        last, weighted = x, scaled * weight[:, None]
        x = nonnegative(weighted.T @ scaled, weighted.sum(axis=0))
        error = np.abs(scaled @ x - 1)
        scale = max(_MAD_TO_SIGMA * _median(error, weights), _LEAST_SCALE)
        weight = own * np.minimum(1.0, _TUNING * scale / np.maximum(error, 1e-300))
        if np.allclose(x, last, rtol=1e-6, atol=0.0):
            break
    return x


def _median(values: Floats, weights: Floats | None) -> float:
    if weights is None:
        return float(np.median(values))
    return float(np.quantile(values, 0.5, weights=weights, method="inverted_cdf"))
