"""Draws without a generator: numbers that look random and are a function of their place.

Invariant: the same arguments give the same numbers on every machine, and nothing is remembered
between two calls, so a decision made from them can be made again.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["hashed_uniforms", "resampled"]

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def hashed_uniforms(shape: tuple[int, ...], *, seed: int) -> NDArray[np.float64]:
    """Uniform numbers inside (0, 1) of this shape: SplitMix64 (Steele, Lea and Flood, 2014)."""
    count = math.prod(shape)
    key = _mixed(np.array([seed % 2**64], dtype=np.uint64) * _WEYL + _WEYL)
    words = _mixed(np.arange(1, count + 1, dtype=np.uint64) * _WEYL + key)
    # 52 bits and a half: neither 0 nor 1, whose quantiles of an unbounded law are infinite.
    return (((words >> np.uint64(12)).astype(np.float64) + 0.5) / 2**52).reshape(shape)


def resampled(population: int, count: int, *, seed: int) -> NDArray[np.int64]:
    """Places int64 [count] below `population`, each as often as any other, in random order.

    Systematic resampling: each place comes floor or ceil of count / population times, so that
    no chance stands between the means of what is resampled and of what it is taken from, while
    neighbours in the order are as unlike as in independent draws.
    """
    uniform = hashed_uniforms((count + 1,), seed=seed)
    places = np.floor((np.arange(count) + uniform[0]) * population / count).astype(np.int64)
    return np.minimum(places, population - 1)[np.argsort(uniform[1:], kind="stable")]


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
