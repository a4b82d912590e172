"""A histogram that takes many values at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Buckets", "Histogram"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """The content of a histogram at one moment: `counts` has the number of values up to each edge,
    and the number of all."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Histogram:
    """Counts values by the smallest of the `edges` that they do not exceed. There is one more
    bucket, for larger values."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = np.asarray(edges, dtype=np.float64)
        self._counts = np.zeros(len(edges) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, values: ArrayLike) -> None:
        """Count a value, or an array of them."""
        observed = np.atleast_1d(np.asarray(values, dtype=np.float64))
        places = np.searchsorted(self._edges, observed, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(observed.sum())

    def buckets(self) -> Buckets:
        """The present content."""
        return Buckets(
            edges=tuple(self._edges.tolist()),
            counts=tuple(np.cumsum(self._counts).tolist()),
            sum=self._sum,
        )
